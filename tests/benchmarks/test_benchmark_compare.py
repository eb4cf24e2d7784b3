"""`benchmark compare`: every number belongs to its model, scores can be kept, and the picture is readable."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tiny_job import job_in, save_model, workshop_in

from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.benchmarks import compare, compare_plot
from mrem_deploy.benchmarks.compare_rows import Conditions, Entry, Score, Speed, read, table_and_notes
from mrem_deploy.report.plots import plot_style

PNG = b"\x89PNG\r\n\x1a\n"
FAST = ["--shape", "1x8", "--rounds", "2", "--warmup", "1"]
CONDITIONS = Conditions("bert", "mnli", "accuracy", "dev", 100, "0" * 16, "1x128", 1, 30, "A Processor")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two results of one model, and the comparison of both in `out`."""
    with workshop_in(tmp_path_factory.mktemp("compare")) as root:
        for out, bits in (("four", "4-4-8"), ("two", "2-2-8")):
            assert job_in(root, out, bits=bits, method="ptq", steps=None, export="ort-cpu").run() == 0
        line = ["compare", str(root / "four"), str(root / "two"), *FAST, "--out", str(root / "out")]
        assert cli.run(benchmark.main, line) == 0
        yield root


def content(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    return loaded


def test_every_model_has_its_own_score_size_and_latency(workshop: Path) -> None:
    out = workshop / "out"
    written = content(out)
    rows = {row["name"]: row for row in written["rows"]}
    assert list(rows) == ["ORT fp32", "quantize_dynamic", "quantize_static", "ours 4-4-8", "ours 2-2-8"]
    assert [row["ours"] for row in rows.values()] == [False, False, False, True, True]
    assert written["settings"]["examples"] == 40
    assert written["settings"]["shape"] == "1x8"
    for folder, bits in (("four", "4-4-8"), ("two", "2-2-8")):
        metrics = json.loads((workshop / folder / "metrics.json").read_text(encoding="utf-8"))
        row = rows[f"ours {bits}"]
        assert row["score"]["value"] == pytest.approx(metrics["accuracy"]["onnx"])
        assert row["file_mib"] == (workshop / folder / "model.onnx").stat().st_size / 2**20
        assert rows["ORT fp32"]["score"]["value"] == pytest.approx(metrics["accuracy"]["full_precision"])
        change = row["score"]["value"] - rows["ORT fp32"]["score"]["value"]
        assert row["score"]["change"] == pytest.approx(change)
        assert row["score"]["low"] <= change <= row["score"]["high"]
    assert rows["ORT fp32"]["score"]["agreement"] == 100
    assert rows["ours 2-2-8"]["score"]["agreement"] < 100
    for row in rows.values():
        assert row["score"]["flips"] == pytest.approx(100 - row["score"]["agreement"])
    assert (rows["ORT fp32"]["score"]["kl"], rows["ORT fp32"]["score"]["kl_error"]) == (0.0, 0.0)
    two = rows["ours 2-2-8"]["score"]
    assert two["kl"] > max(two["kl_error"], rows["ours 4-4-8"]["score"]["kl"])
    shown = (out / "compare.md").read_text(encoding="utf-8")
    assert "flips, %" in shown
    assert f"{two['kl']:.4f} ± {two['kl_error']:.4f}" in shown
    assert all(len(row["speed"]["rounds_ms"]) == 2 for row in rows.values())
    assert rows["ORT fp32"]["speed"]["ratio"] == 1
    table = (out / "compare.md").read_text(encoding="utf-8")
    assert all(f"| {name}" in table for name in rows)
    assert (out / "compare.png").read_bytes().startswith(PNG)
    assert "<svg" in (out / "compare.svg").read_text(encoding="utf-8")
    assert len(list(out.iterdir())) == 4


def test_scores_are_kept_while_time_is_measured_again(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nothing is to be scored")

    monkeypatch.setattr(compare, "_score", refuse)
    source = workshop / "out" / "compare.json"
    folders = [str(workshop / "four"), str(workshop / "two")]
    line = ["compare", *folders, "--from", str(source), *FAST, "--out", str(tmp_path)]
    assert cli.run(benchmark.main, [*line, "--rounds", "3"]) == 0
    before, after = content(workshop / "out"), content(tmp_path)
    assert [row["score"] for row in after["rows"]] == [row["score"] for row in before["rows"]]
    assert all(len(row["speed"]["rounds_ms"]) == 3 for row in after["rows"])
    # A result that was made again since has other scores.
    changed = json.loads(source.read_text(encoding="utf-8"))
    changed["rows"][3]["recipe_digest"] = "another"
    (tmp_path / "old.json").write_text(json.dumps(changed), encoding="utf-8")
    line[line.index("--from") + 1] = str(tmp_path / "old.json")
    assert cli.run(benchmark.main, line) == cli.EXIT_USER_ERROR
    assert "no score of ours 4-4-8" in capsys.readouterr().err


def test_the_picture_is_drawn_again_and_the_numbers_stay(workshop: Path, tmp_path: Path) -> None:
    source = workshop / "out" / "compare.json"
    assert cli.run(benchmark.main, ["compare", "--from", str(source), "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.md", "compare.png", "compare.svg"]
    table = (workshop / "out" / "compare.md").read_text(encoding="utf-8")
    assert (tmp_path / "compare.md").read_text(encoding="utf-8") == table


def test_a_file_without_divergences_is_read(workshop: Path, tmp_path: Path) -> None:
    written = content(workshop / "out")
    for row in written["rows"]:
        for name in ("flips", "flips_error", "kl", "kl_error"):
            del row["score"][name]
    (tmp_path / "old.json").write_text(json.dumps(written), encoding="utf-8")
    table, notes = table_and_notes(*read(tmp_path / "old.json"))
    assert "KL" not in table + notes
    assert "ours 2-2-8" in table


def test_results_of_different_models_are_refused(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model")
    other = tmp_path / "other"
    shutil.copytree(workshop / "two", other)
    recipe = (other / "recipe.yaml").read_text(encoding="utf-8")
    (other / "recipe.yaml").write_text(
        recipe.replace(str(workshop / "model"), str(tmp_path / "model")), encoding="utf-8"
    )
    line = ["compare", str(workshop / "four"), str(other)]
    assert cli.run(benchmark.main, line) == cli.EXIT_USER_ERROR
    assert "cannot be compared: their model is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no result folder was given"),
        (["--from", "nothing.json"], "cannot be read as a compare.json"),
        (["nowhere"], "has no recipe.yaml"),
        (["--shape", "8by8"], "'8by8' is not a shape"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(benchmark.main, ["compare", *arguments]) == cli.EXIT_USER_ERROR
    shown = capsys.readouterr().err
    assert message in shown
    assert "→" in shown


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from mrem_deploy import benchmark\n"
        "try: benchmark.main(['compare', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "RESULT" in done.stdout
    assert done.returncode == 0, "torch was loaded"


def test_equal_bits_are_told_apart_by_method_or_folder() -> None:
    def names(*settings: tuple[str, str, str]) -> list[str]:
        from mrem_deploy.recipe import Recipe

        recipes = {Path(folder): Recipe(bits=bits, method=method) for folder, bits, method in settings}
        return list(compare._names(recipes).values())

    assert names(("a", "4-4-8", "rem"), ("b", "2-2-8", "rem")) == ["ours 4-4-8", "ours 2-2-8"]
    assert names(("a", "4-4-8", "rem"), ("b", "4-4-8", "ptq")) == ["ours 4-4-8, rem", "ours 4-4-8, ptq"]
    assert names(("a", "4-4-8", "rem"), ("b", "4-4-8", "rem")) == ["ours 4-4-8, a", "ours 4-4-8, b"]


def entry(name: str, value: float, ratio: float, mib: float) -> Entry:
    change = value - 72.0
    bar = (None, None, None) if name == compare.BASE else (0.3, change - 0.6, change + 0.6)
    speed = Speed(70 / ratio, 71 / ratio, ratio, (ratio, ratio), (70 / ratio,))
    return Entry(name, name.startswith("ours"), mib, Score(value, 99.0, change, *bar), speed)


CROWDED = [
    [("quantize_dynamic", 70.9, 2.29), ("quantize_static", 70.5, 2.25), ("ours 4-4-8", 71.7, 2.87)],
    [("quantize_dynamic", 71.9, 2.5), ("quantize_static", 71.8, 2.55), ("ours 4-4-8", 71.9, 2.9)],
    [("quantize_dynamic", 71.5, 1.0), ("quantize_static", 71.0, 1.0), ("ours 4-4-8", 70.0, 1.0)],
]


@pytest.mark.parametrize("others", CROWDED)
def test_labels_overlap_neither_each_other_nor_the_bubbles(others: list[tuple[str, float, float]]) -> None:
    entries = [entry(compare.BASE, 72.0, 1.0, 127.0), *(entry(n, v, r, 30.0) for n, v, r in others)]
    with plot_style():
        figure = compare_plot.draw(CONDITIONS, entries)
        axes = figure.axes[0]
        labels = [text for text in axes.texts if "MiB" in text.get_text()]
        assert len(labels) == len(entries)
        boxes = [text.get_window_extent() for text in labels]
        bubbles = [
            compare_plot._drawn(axes, each, diameter)[0]
            for each, diameter in zip(entries, compare_plot._diameters(entries), strict=True)
        ]
    assert all(compare_plot._area(one, other) == 0 for one, other in combinations(boxes, 2))
    assert all(compare_plot._area(label, bubble) == 0 for label in boxes for bubble in bubbles)
