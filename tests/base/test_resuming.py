"""The command that continues a run: there when a checkpoint is, and known to what ended the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrem_deploy.base.resuming import COMMAND, command_after, continue_command, resumable, work_folder


def leave(out: Path, *names: str) -> None:
    work_folder(out).mkdir(exist_ok=True)
    for name in names:
        (work_folder(out) / name).write_text("mrem quantize --config x\n")


def test_the_command_is_there_when_a_checkpoint_is(tmp_path: Path) -> None:
    out = tmp_path / "result"
    assert continue_command(out) is None
    leave(out, COMMAND)
    assert continue_command(out) is None  # nothing to continue from
    leave(out, ".module-0.safetensors.x1y2")  # half a checkpoint, of a run that was killed
    assert continue_command(out) is None
    leave(out, "module-0.safetensors")
    assert continue_command(out) == "mrem quantize --config x"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), ValueError()], ids=repr)
def test_what_ended_a_run_knows_how_it_is_continued(tmp_path: Path, error: BaseException) -> None:
    out = tmp_path / "result"
    assert command_after(error) is None

    def run() -> None:
        with resumable(out):
            leave(out, COMMAND, "module-0.safetensors")
            raise error

    with pytest.raises(type(error)):
        run()
    assert command_after(error) == "mrem quantize --config x"
