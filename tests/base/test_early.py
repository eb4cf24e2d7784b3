"""Signals while a command starts, and while its process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import sys\nfrom mrem_deploy.__main__ import main\nsys.exit(main())\n"
# In every new interpreter: a signal when Python looks for that module, or at the very end.
DISTURB = """
import atexit, os, signal, sys

class Disturber:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("SIGNAL_AT"):
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))

sys.meta_path.insert(0, Disturber())
if os.environ.get("SIGNAL_AT") == "the end":
    atexit.register(lambda: os.kill(os.getpid(), int(os.environ["SIGNAL"])))

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(os.environ.get("SIGNAL", "0"))):
        kill(pid, number)

if os.environ.get("SIGNAL_AT") == "the very end":  # Python has forgotten its handlers
    sys.last = Last()
"""
# A run under nohup or from a shell's background ignores some of these, and child processes inherit that.
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="signals of POSIX")


@pytest.fixture
def disturbed(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python; it gets a signal when it imports a module."""
    (tmp_path / "sitecustomize.py").write_text(DISTURB)
    (tmp_path / "mrem").write_text(SCRIPT)

    def run(
        *words: str, at: str, number: int = signal.SIGINT, ignored: bool = False
    ) -> subprocess.CompletedProcess[str]:
        handler = signal.SIG_IGN if ignored else signal.SIG_DFL
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
                "SIGNAL_AT": at,
                "SIGNAL": str(int(number)),
            },
            capture_output=True,
            text=True,
            preexec_fn=lambda: [signal.signal(one, handler) for one in SIGNALS],
        )

    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("mrem", "verify", "nowhere"), "mrem_deploy.__main__"),
        (("-m", "mrem_deploy", "verify", "nowhere"), "mrem_deploy.base.cli"),
        (("-m", "mrem_deploy.verify", "nowhere"), "argparse"),
        (("-mmrem_deploy.export", "nowhere"), "mrem_deploy.export"),
    ],
)
def test_a_signal_while_a_command_starts(
    disturbed: Callable[..., subprocess.CompletedProcess[str]],
    words: tuple[str, ...],
    module: str,
    number: signal.Signals,
) -> None:
    done = disturbed(*words, at=module, number=number)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "\ninterrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["the end", "the very end"])
def test_a_signal_after_the_command_does_not_change_its_end(
    disturbed: Callable[..., subprocess.CompletedProcess[str]], number: signal.Signals, moment: str
) -> None:
    done = disturbed("-m", "mrem_deploy.verify", "nowhere", at=moment, number=number)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_what_the_caller_ignores_is_ignored(
    disturbed: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = disturbed("-m", "mrem_deploy.verify", "nowhere", at="mrem_deploy.base.cli", ignored=True)
    assert done.returncode == 2
    assert "interrupted" not in done.stderr


@pytest.mark.parametrize("words", [("-c",), ("program.py",), ("-m", "program")])
def test_a_program_that_imports_the_package_keeps_its_handlers(
    disturbed: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, words: tuple[str, ...]
) -> None:
    text = "import mrem_deploy, signal; print(signal.getsignal(2).__name__, signal.getsignal(15) == 0)"
    (tmp_path / "program.py").write_text(text)
    done = disturbed(*words, *([text] if words == ("-c",) else []), at="nothing")
    assert done.stdout.split("\n")[0] == "default_int_handler True", done.stderr
