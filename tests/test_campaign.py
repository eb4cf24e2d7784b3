"""The campaign of faults judges rightly: it notices planted faults, and nothing else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.campaign import __main__ as script
from tests.campaign import page
from tests.campaign.__main__ import Campaign, main
from tests.campaign.cases import FAULTS, KINDS, Case, Outcome, all_cases, read_log
from tests.campaign.interruptions import continuing_argv
from tests.campaign.mutations import mutate, same_content
from tests.campaign.workshop import stages_in

SCRIPT = Path(__file__).parent / "helpers" / "planted_faults.py"


@pytest.fixture(scope="module")
def noticed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the campaign needs Linux")
    folder = tmp_path_factory.mktemp("planted")
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("refuse_without_a_word", "wrong message"),
        ("leave_file", "leftover"),
        ("leave_temporary_file", "leftover"),
        ("leave_process", "leftover"),
        ("raise_error", "traceback"),
        ("crash", "crash"),
        ("hang", "hang"),
        ("ignore_sigterm", "wrong message"),
        ("changed tensor", "silent damage"),
    ],
)
def test_a_planted_fault_is_noticed(noticed: dict[str, Any], program: str, fault: str) -> None:
    assert list(noticed[program]) == [fault]


def test_the_order_of_a_header_is_no_damage(tmp_path: Path) -> None:
    ones, twos = np.ones(3, "f4"), np.full(3, 2, "f4")
    written = {"a": ({"x": ones, "y": twos}, "1"), "b": ({"y": twos, "x": ones}, "1"),
               "value": ({"x": ones, "y": ones}, "1"), "about": ({"x": ones, "y": twos}, "2")}  # fmt: skip
    for name, (tensors, note) in written.items():
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata={"note": note, "more": "m"})
    (tmp_path / "cut.safetensors").write_bytes(b"12")
    (tmp_path / "cut too.safetensors").write_bytes(b"123")
    equal = {
        name for name in ("a", "b", "value", "about", "cut", "gone")
        if same_content(tmp_path / "a.safetensors", tmp_path / f"{name}.safetensors")
    }  # fmt: skip
    assert equal == {"a", "b"}
    assert not same_content(tmp_path / "cut.safetensors", tmp_path / "cut too.safetensors")


@pytest.mark.parametrize("program", ["refuse", "obey_sigterm", "same tensor"])
def test_what_is_right_is_not_blamed(noticed: dict[str, Any], program: str) -> None:
    assert noticed[program] == {}


def test_a_write_can_be_killed_or_meet_a_full_disk(noticed: dict[str, Any]) -> None:
    assert noticed["killed write"] == [-9, ["a"], False]
    assert noticed["full disk"] == [1, ["a"], True]


def test_the_campaign_is_as_large_as_promised() -> None:
    counted = Counter(case.kind for case in all_cases())
    assert counted["kill"] + counted["crew"] >= 300
    least = {"signal": 100, "disk": 50, "damage": 2000, "option": 500, "input": 300}
    assert all(counted[kind] >= number for kind, number in least.items())
    first = Counter(case.kind for case in all_cases()[:200])
    assert set(first) == set(KINDS), "a part has its share of every kind"


def test_a_case_is_decided_by_seed_and_id() -> None:
    case = Case.parse("damage-0042")
    assert case == Case("damage", 42)
    assert case.draw(1).random() == Case("damage", 42).draw(1).random()
    assert case.draw(1).random() != case.draw(2).random()
    for wrong in ("damage", "damage-9999", "unknown-0001", "kill--1"):
        with pytest.raises(ValueError, match="there is no case"):
            Case.parse(wrong)


def test_the_log_survives_a_kill_of_the_campaign(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    whole = Outcome("kill-0001", what="\ud800", faults={"hang": "x"})
    log.write_text(f"{whole.line()}\n{Outcome('kill-0002').line()[:20]}", encoding="utf-8")
    assert read_log(log) == {"kill-0001": whole}


def test_mutations_change_something_and_are_repeatable(tmp_path: Path) -> None:
    def mutated(name: str, seed: int) -> tuple[str, dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mrem.json").write_text(json.dumps({"a": [1, 2.5], "b": {"c": "text"}}, indent=2))
        save_file({"x": np.ones(4, np.float32), "y": np.zeros(2, np.uint8)}, folder / "t.safetensors")
        words = mutate(folder, ["mrem.json", "t.safetensors"], random.Random(seed))
        content = {
            path.name: str(path.readlink())
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else ""
            for path in folder.iterdir()
        }
        return words, content

    untouched = tmp_path / "untouched"
    changed = 0
    for seed in range(120):
        first, again = mutated(f"{seed}", seed), mutated(f"{seed}-again", seed)
        assert first == again
        changed += first[1] != _unmutated(untouched)
    assert changed > 110, "almost every mutation shows"


def _unmutated(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        folder.mkdir()
        (folder / "mrem.json").write_text(json.dumps({"a": [1, 2.5], "b": {"c": "text"}}, indent=2))
        save_file({"x": np.ones(4, np.float32), "y": np.zeros(2, np.uint8)}, folder / "t.safetensors")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_stages_are_recognized_by_what_is_printed() -> None:
    printed = (
        "loading x\ninitialising scales on 2 batches\ntrain module 1/2            :   0%|   | 0/6\r"
        "train module 1/2            : 100%|###| 6/6\ncache after module 1/2      :   0%| |\n"
        "evaluate dev quantized      :   0%|\revaluate dev quantized      : 100%|"
    )
    names = ["loading", "calibration", "training", "caching", "evaluating", "publishing"]
    assert stages_in(printed) == names


@pytest.mark.parametrize(
    "program", ["mrem quantize", "/a/bin/mrem quantize", "python -m mrem_deploy.quantize"]
)
def test_the_command_that_continues_is_read(program: str) -> None:
    assert continuing_argv(f"{program} --config 'a b/recipe.yaml'") == [
        "quantize",
        "--config",
        "a b/recipe.yaml",
    ]


def test_the_page_has_the_table_and_what_was_not_survived(tmp_path: Path) -> None:
    outcomes = [
        Outcome("kill-0001"),
        Outcome("kill-0002", faults={"leftover": "a|b"}),
        Outcome("signal-0001", leave_seconds=1.5),
    ]
    path = tmp_path / "reliability.md"
    path.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", encoding="utf-8")
    page.write(path, page.markdown(outcomes, "make faults", 3))
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| kills | 2 | 1 | 0 | 0 | 0 | 0 | 1 | 0 |" in text
    assert "| all | 3 | 2 |" in text
    assert r"- `kill-0002`: leftover: a\|b" in text
    assert "seed 3" in text
    assert "1.5 s" in text
    assert all(fault in text for fault in FAULTS)
    assert "3 of 3,250 cases; the others were not tried" in text
    path.write_text("no place", encoding="utf-8")
    with pytest.raises(ValueError, match="no place for the table"):
        page.write(path, "x")


@pytest.mark.parametrize(("minutes", "tried"), [(0.0, 0), (1.0, 2), (None, 10)])
def test_the_time_counts_from_the_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, tried: int
) -> None:
    """On a slow machine the preparation alone may take longer than the part that is asked for."""
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=wait))
    monkeypatch.setattr(Campaign, "_prepare", lambda self, kinds: wait(600))
    monkeypatch.setattr(Campaign, "_start", lambda self, case: case.number)

    def collect(self: Campaign, pid: int, case: Case, started: float) -> Outcome:
        wait(40)
        return Outcome(case.id)

    monkeypatch.setattr(Campaign, "_collect", collect)
    cases = [Case("input", number) for number in range(10)]
    assert len(Campaign(tmp_path, 0, 1, minutes, False).run(cases)) == tried


def test_a_mistake_in_the_options_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kinds", "kill,nothing"]) == 2
    assert main(["--only", "kill-x"]) == 2
    assert "there is no case 'kill-x'" in capsys.readouterr().err
