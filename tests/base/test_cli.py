"""Exit codes and messages of commands, and what they set before torch is loaded."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from mrem_deploy import __main__ as command
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError, WorkerFailed


def raising(error: BaseException) -> Callable[[list[str] | None], int]:
    def main(argv: list[str] | None) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("it is wrong", "mend it"), cli.EXIT_USER_ERROR, "error: it is wrong\n  → mend it\n"),
        (WorkerFailed("it died"), cli.EXIT_FAILED, "error: it died\n"),
        (KeyboardInterrupt(), cli.EXIT_INTERRUPTED, "\ninterrupted\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(raising(error)) == code
    assert capsys.readouterr().err == message


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(raising(ZeroDivisionError()))


def test_ctrl_c_mentions_resume_only_where_there_is_such_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(raising(KeyboardInterrupt()), resumes=True) == cli.EXIT_INTERRUPTED
    assert "interrupted before the first checkpoint" in capsys.readouterr().err
    for name, verb in command.VERBS.items():
        with contextlib.suppress(SystemExit):
            command.main([name, "--help"])
        assert ("--resume" in capsys.readouterr().out) == verb.resumes, name


def environment(words: str, **given: str) -> list[str]:
    """The settings that torch's libraries see while a command runs, in a new process."""
    code = f"""
import os, sys
from mrem_deploy.base import cli
assert "torch" not in sys.modules
def main(argv):
    print(*(os.environ.get(name) for name in {words.split()}))
    return 0
cli.run(main)
"""
    clean = {k: v for k, v in os.environ.items() if k not in {*cli.PASSIVE_WAITING, "ONEDNN_MAX_CPU_ISA"}}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


WAITING = " ".join(cli.PASSIVE_WAITING)


def test_threads_hardly_spin_unless_the_user_says_otherwise() -> None:
    assert environment(WAITING) == ["passive", "5000", "0"]
    assert environment(WAITING, OMP_WAIT_POLICY="active") == ["active", "None", "None"]
    assert environment(WAITING, GOMP_SPINCOUNT="9") == ["None", "9", "None"]
    assert environment("ONEDNN_MAX_CPU_ISA", ONEDNN_MAX_CPU_ISA="AVX2") == ["AVX2"]


@pytest.mark.parametrize(
    "module",
    [
        "quantize",
        "export.__main__",
        "validate",
        "verify",
        "finetune",
        "benchmark",
        "reproduce.__main__",
        "doctor",
    ],
)
def test_the_settings_precede_torch(module: str) -> None:
    """`python -m mrem_deploy.VERB` imports the module before it can set anything."""
    code = f"import sys, mrem_deploy.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_verb_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["quantise"]) == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert "unknown verb 'quantise'" in told
    assert all(name in told for name in command.VERBS)
