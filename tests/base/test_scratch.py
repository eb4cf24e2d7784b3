"""Temporary folders and files: those of the dead are removed, those of the living are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mrem_deploy.base import scratch
from mrem_deploy.base.scratch import owned_file, owned_folder, scratch_folder, sweep, sweep_files

ROOT = Path(__file__).resolve().parents[2]
MAKER = """
import sys
from pathlib import Path
from mrem_deploy.base.scratch import scratch_folder
with scratch_folder("census", Path(sys.argv[1])) as folder:
    (folder / "weights.bin").write_bytes(b"0")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_there_until_the_end(tmp_path: Path) -> None:
    with scratch_folder("census", tmp_path) as folder:
        (folder / "file").write_text("x")
        assert folder.parent == tmp_path
        assert folder.name.startswith("mrem-census-")
    assert list(tmp_path.iterdir()) == []


def test_the_usual_parent_is_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("census") as folder:
        assert folder.parent == tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        other = Path(process.stdout.readline().strip())
        with scratch_folder("workers", tmp_path):
            assert other.is_dir()  # its owner lives
    finally:
        process.kill()
        process.communicate()
    assert (other / "weights.bin").exists()
    with scratch_folder("workers", tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]


def test_what_looks_similar_stays(tmp_path: Path) -> None:
    (tmp_path / "mrem-notes.tmp").write_text("a file")
    (tmp_path / "mrem-result").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mrem-link.tmp").symlink_to(tmp_path / "elsewhere")
    with scratch_folder("x", tmp_path):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "elsewhere",
        "mrem-link.tmp",
        "mrem-notes.tmp",
        "mrem-result",
    ]


BOTH = pytest.mark.parametrize(
    ("owned", "sweep_all", "maker"),
    [(owned_folder, sweep, "mkdtemp"), (owned_file, sweep_files, "mkstemp")],
    ids=["folder", "file"],
)


@BOTH
def test_what_is_swept_before_it_is_locked_is_made_again(
    owned: Any, sweep_all: Any, maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = getattr(tempfile, maker), []

    def make(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        if not swept:
            swept.append(made if maker == "mkdtemp" else made[1])
            sweep_all(tmp_path, "x-")
        return made

    monkeypatch.setattr(tempfile, maker, make)
    with owned(tmp_path, "x-") as path:
        assert len(swept) == 1
        assert str(path) not in swept
        assert list(tmp_path.iterdir()) == [path]


@BOTH
def test_without_locks_nobody_knows_who_is_dead(
    owned: Any, sweep_all: Any, maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "HAS_LOCKS", False)
    with owned(tmp_path, "x-") as path:
        sweep_all(tmp_path, "x-")
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    with owned_folder(tmp_path, "x-") as folder:
        shutil.rmtree(folder)


def test_a_file_is_left_alone_while_its_owner_lives(tmp_path: Path) -> None:
    (tmp_path / ".x.new-dead").write_text("of a killed process")
    (tmp_path / ".x.new-folder").mkdir()
    (tmp_path / ".x.new-link").symlink_to(tmp_path / ".x.new-folder")
    with owned_file(tmp_path, ".x.new-") as file:
        sweep_files(tmp_path, ".x.new-")
        assert sorted(tmp_path.iterdir()) == sorted(
            [file, tmp_path / ".x.new-folder", tmp_path / ".x.new-link"]
        )
    assert not file.exists()


def test_the_temporary_folder_is_chosen_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python tries a folder by a file in it, under any name: after a kill nobody knows whose it is."""
    (tmp_path / "file").touch()
    (tmp_path / "good").mkdir()
    made: list[str] = []
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: made.append(os.fspath(path)) or opened(path, *rest))
    for first in ("good", "file", "missing"):
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", str(tmp_path / first))
        monkeypatch.setenv("TEMP", str(tmp_path / "good"))
        scratch.settle_temporary_folder()
        assert tempfile.gettempdir() == str(tmp_path / "good")
    named = {path for path in made if Path(path).parent == tmp_path / "good"}
    assert not named or not hasattr(os, "O_TMPFILE")


def test_a_temporary_folder_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/chosen")
    scratch.settle_temporary_folder()
    assert tempfile.tempdir == "/chosen"
