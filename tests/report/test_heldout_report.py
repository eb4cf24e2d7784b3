"""Held-out losses in a report: a table, diamonds in the plot, and a warning where they rose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from a_result import CURVES, METRICS, write

from mrem_deploy.report.heldout import heldout_tables, heldout_warnings
from mrem_deploy.report.plots import draw_plots
from mrem_deploy.report.summary import terminal_summary
from mrem_deploy.result import HeldOut, History, Sizes

HELD = {"module 0": HeldOut(0.5, 0.25, 0.25, 20), "module 1": HeldOut(0.5, 0.75, 0.4, 10)}
LOOKS = {"module 0": [(0, 0.5), (20, 0.25)], "module 1": [(0, 0.5), (10, 0.4), (20, 0.75)]}


def test_the_table_and_the_line_show_the_state_that_is_the_result(tmp_path: Path) -> None:
    shown = replace(METRICS, heldout=HELD)
    page = write(tmp_path, shown)
    assert ["module 1", "0.500", "0.750", "0.400", "after step 10"] in page.rows
    assert "held-out loss by module: 0.250, 0.400" in terminal_summary(shown, tmp_path)


def test_a_method_that_does_not_look_while_training_has_dashes() -> None:
    (table,) = heldout_tables(replace(METRICS, heldout={"module 1/1": HeldOut.of([(7, 0.25)])}))
    assert table.rows == [("module 1/1", "—", "0.250", "0.250", "—")]


def test_a_loss_that_rose_is_warned_about(tmp_path: Path) -> None:
    (warning,) = heldout_warnings(replace(METRICS, heldout=HELD))
    assert "for: module 1. An earlier state was kept" in warning
    assert warning in write(tmp_path, replace(METRICS, heldout=HELD)).text
    assert heldout_warnings(replace(METRICS, heldout={"module 0": HELD["module 0"]})) == []


def test_a_result_without_held_out_sentences_says_nothing_of_them(tmp_path: Path) -> None:
    assert heldout_tables(METRICS) == []
    assert "eld-out" not in write(tmp_path).text
    assert "held-out" not in terminal_summary(METRICS, tmp_path)


def test_diamonds_in_the_plot() -> None:
    plain, marked = (draw_plots(History(CURVES, heldout=found), Sizes())[0] for found in ({}, LOOKS))
    assert "Diamonds" in marked.caption
    assert ">held-out<" in marked.svg
    assert "eld-out" not in plain.caption + plain.svg
    lost = draw_plots(History(CURVES, heldout={"another unit": [(0, 1.0)]}), Sizes())[0]
    assert lost.svg == plain.svg  # rem's and qat's curves are of other units than modules
