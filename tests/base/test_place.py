"""The place of a result: one run at a time, whatever became of the others, and nothing of the dead left."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mrem_deploy.base import place, scratch
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.place import hold
from mrem_deploy.base.scratch import owned_folder

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from mrem_deploy.base.place import hold
with hold(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(out: Path, token: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the place until it is killed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out), token],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "result"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_run_is_refused_and_the_first_one_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mrem", "quantize", "--out", "my result"])
    with hold(out, "one"):
        with pytest.raises(UserError) as caught, hold(out, "two"):
            pass
        for word in (str(out), f"process {os.getpid()} on {platform.node()}", "started 20"):
            assert word in caught.value.problem
        assert caught.value.problem.endswith(": mrem quantize --out 'my result'")
        assert "--out" in caught.value.remedy
    assert names(out.parent) == []
    with hold(out, "two"):
        assert names(out.parent) == [".result.lock"]
    assert names(out.parent) == []


def test_two_places_do_not_disturb_each_other(out: Path) -> None:
    with hold(out, "one"), hold(out.with_name("other"), "two"):
        pass


def test_the_processes_of_one_run_share_the_place(out: Path) -> None:
    """The launcher has it first; a worker that outlives it still keeps others away."""
    with another_process(out, "run") as launcher, hold(out, "run"):
        launcher.kill()
        launcher.wait()
        with pytest.raises(UserError, match=f"process {launcher.pid} on"), hold(out, "other"):
            pass
    assert names(out.parent) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_the_lock_dies_with_its_process(out: Path) -> None:
    with another_process(out, "killed") as process:
        with pytest.raises(UserError, match=f"process {process.pid} on .* -c"), hold(out, "next"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert names(out.parent) == [".result.lock"]
        with hold(out, "next"):
            pass
    assert names(out.parent) == []


def test_a_run_that_comes_in_between_wins(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is first exclusive, then shared; in the moment between them another run may take it."""
    real = place.try_lock
    with ExitStack() as stack:

        def try_lock(handle: int, shared: bool = False) -> bool:
            if shared:
                monkeypatch.setattr(place, "try_lock", real)
                fcntl.flock(handle, fcntl.LOCK_UN)
                stack.enter_context(hold(out, "quick"))
            return real(handle, shared)

        monkeypatch.setattr(place, "try_lock", try_lock)
        with pytest.raises(UserError, match="another run"), hold(out, "slow"):
            pass
        with pytest.raises(UserError, match="another run"), hold(out, "slow"):
            pass
    assert names(out.parent) == []


def test_a_lock_file_that_was_removed_is_made_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking it, the last process of another run may have removed it."""
    real = place.try_lock

    def try_lock(handle: int, shared: bool = False) -> bool:
        monkeypatch.setattr(place, "try_lock", real)
        (out.parent / ".result.lock").unlink()
        return real(handle, shared)

    monkeypatch.setattr(place, "try_lock", try_lock)
    with hold(out, "one"), pytest.raises(UserError), hold(out, "two"):
        pass
    assert names(out.parent) == []


def test_folders_made_for_a_run_that_left_nothing_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "result"
    with hold(out, "one"):
        assert names(out.parent) == [".result.lock"]
    assert names(tmp_path) == []
    with hold(out, "one"):
        out.mkdir()
    assert names(out.parent) == ["result"]


def test_without_locks_a_run_says_so(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, "HAS_LOCKS", False)
    with hold(out, "one"):
        assert "has no file locks; start no second run" in capsys.readouterr().err


# -- what killed runs have left ------------------------------------------------------------------------------


def leave(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("name", ["result", "[a]b*"])
def test_leftovers_are_removed_and_checkpoints_kept(tmp_path: Path, name: str) -> None:
    out = leave(tmp_path / name, "mrem.json")
    leave(tmp_path / f".{name}.new-k1ll", "mrem.json")
    leave(tmp_path / f".{name}.old-k1ll", "mrem.json")
    leave(tmp_path / f".{name}.work", "run.json", "module-0.safetensors", ".module-1.safetensors.x9")
    leave(tmp_path / f".{name}.work-gone", "module-0.safetensors")  # killed while it removed them
    others = [".my.new-car", f".{name}s.new-x", f"{name}.new-x", ".a.new-x"]
    for other in others:
        leave(tmp_path / other, "thesis.txt")
    with owned_folder(tmp_path, f".{name}.new-") as alive:
        with hold(out, "next"):
            assert alive.is_dir()
            left = [f".{name}.lock", f".{name}.work", alive.name, name, *others]
            assert names(tmp_path) == sorted(left)
        assert names(tmp_path / f".{name}.work") == ["module-0.safetensors", "run.json"]


@pytest.mark.parametrize("empty", [True, False])
def test_a_result_that_was_moved_aside_is_restored(
    out: Path, empty: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between two renames: neither the old nor the new result is in place, at most a new folder."""
    if empty:
        out.mkdir()
    leave(out.with_name(".result.old-k1ll"), "mrem.json")
    leave(out.with_name(".result.new-k1ll"), "mrem.json")
    with hold(out, "next"):
        assert names(out.parent) == [".result.lock", "result"]
        assert names(out) == ["mrem.json"]
    assert f"restored {out}" in capsys.readouterr().err


def test_leftovers_go_even_where_folders_cannot_be_locked(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS: who holds the place knows that no one else writes there."""
    leave(out.with_name(".result.new-k1ll"), "mrem.json")
    monkeypatch.setattr(scratch, "HAS_LOCKS", False)
    with hold(out, "next"):
        assert names(out.parent) == [".result.lock"]


def test_only_the_first_process_of_a_run_tidies_up(out: Path) -> None:
    """A worker that joins later must not touch what the run itself is writing."""
    with hold(out, "run"):
        fresh = leave(out.with_name(".result.work"), ".module-0.safetensors.x9")
        with hold(out, "run"):
            assert names(fresh) == [".module-0.safetensors.x9"]
        shutil.rmtree(fresh)
