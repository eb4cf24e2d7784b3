"""Signals set a flag, and only what looks at the flag is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest

from mrem_deploy.base import cli, interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.interrupt import Interrupted

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals"),
    pytest.mark.usefixtures("usual_signals"),
]
PATIENCE = 60.0  # seconds


def watched(work: Callable[[], None]) -> Callable[[], None]:
    """As in a command: signals are not handed on to whoever had them before."""
    return interrupt.watched(hand_on=False)(work)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to wait for, and every signal counts."""
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", 0.02)
    monkeypatch.setattr(interrupt, "AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(interrupt, "SAME_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_is_obeyed_at_the_next_check(number: int, code: int) -> None:
    @watched
    def work() -> None:
        signal.raise_signal(number)
        assert interrupt.pending()  # and nothing has been raised
        interrupt.check()

    with pytest.raises(Interrupted) as stopped:
        work()
    assert stopped.value.number == number
    assert stopped.value.exit_code == code
    assert not interrupt.pending()
    interrupt.check()


def test_without_a_signal_nothing_happens() -> None:
    interrupt.check()
    with interrupt.watched():
        assert list(interrupt.steps([1, 2])) == [1, 2]
        assert not interrupt.pending()


def test_a_loop_ends_at_the_step_after_the_signal() -> None:
    done: list[int] = []

    @watched
    def work() -> None:
        for step in interrupt.steps(range(100)):
            done.append(step)
            if step == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        work()
    assert done == [0, 1, 2]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "wait",
    [
        lambda: time.sleep(PATIENCE),
        lambda: threading.Event().wait(PATIENCE),
        lambda: subprocess.run(["sleep", str(PATIENCE)], check=False),
    ],
    ids=["sleep", "event", "subprocess"],
)
def test_work_without_steps_is_interrupted_after_a_while(wait: Callable[[], object]) -> None:
    started = time.monotonic()

    @watched
    def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        wait()

    with pytest.raises(Interrupted):
        work()
    assert time.monotonic() - started < PATIENCE


class Swallows:
    """Its destructor loses the exception that the handler raises in it, as any destructor does."""

    def __del__(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            pass


@pytest.mark.usefixtures("hasty")
def test_an_exception_that_a_destructor_swallows_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    reached: list[str] = []

    @watched
    def work() -> None:
        swallows = Swallows()
        signal.raise_signal(signal.SIGINT)
        del swallows
        reached.append("after the destructor")  # the first exception is lost
        time.sleep(PATIENCE)

    with pytest.raises(Interrupted):
        work()
    assert reached
    assert "Exception ignored" not in capsys.readouterr().err


@pytest.mark.usefixtures("hasty")
def test_a_second_signal_does_not_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "GRACE_SECONDS", PATIENCE)

    @watched
    def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second signal was not obeyed at once")

    with pytest.raises(Interrupted) as stopped:
        work()
    assert stopped.value.number == signal.SIGTERM  # the first decides the exit code


def test_a_signal_that_is_sent_twice_in_a_moment_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "SAME_SECONDS", PATIENCE)
    reached: list[str] = []

    @watched
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("after both")
        interrupt.check()

    with pytest.raises(Interrupted, match="SIGINT"):
        work()
    assert reached


@pytest.mark.usefixtures("hasty")
def test_what_is_held_happens_as_a_whole() -> None:
    done: list[str] = []

    @watched
    def work() -> None:
        with interrupt.held():
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
                interrupt.check()
            time.sleep(0.2)  # ten times the grace
            done.append("all of it")
        interrupt.check()

    with pytest.raises(Interrupted):
        work()
    assert done


STUBBORN = """
import signal, time
from mrem_deploy.base import cli, interrupt
interrupt.SAME_SECONDS = 0.0
def main(argv):
    with interrupt.farewell(lambda: print("farewell", flush=True)):
        try:
            signal.raise_signal(signal.SIGTERM)
            interrupt.check()
        finally:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(600)
raise SystemExit(cli.run(main))
"""


def test_a_signal_while_leaving_ends_the_process_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 143
    assert done.stdout == "farewell\n"
    assert done.stderr == ""


# -- as a guest in another program ---------------------------------------------------------------------------


def handlers() -> list[object]:
    return [*map(signal.getsignal, interrupt.SIGNALS), sys.unraisablehook]


def test_the_callers_handlers_come_back() -> None:
    before = handlers()
    with interrupt.watched():
        assert all(own != old for own, old in zip(handlers(), before, strict=True))
        with interrupt.watched():  # nested: the outer one counts
            pass
        assert all(own != old for own, old in zip(handlers(), before, strict=True))
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), interrupt.watched():
        raise ZeroDivisionError
    assert handlers() == before


def test_another_thread_installs_nothing() -> None:
    before, seen = handlers(), []

    def run() -> None:
        with interrupt.watched():
            seen.extend(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == before


def test_what_the_caller_ignores_stays_ignored() -> None:
    """As under nohup, and for Ctrl-C in the background of a script."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt.watched():
            signal.raise_signal(signal.SIGHUP)
            interrupt.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_came_too_late_reaches_the_caller() -> None:
    done: list[str] = []

    @interrupt.watched()
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_sigterm_reaches_the_callers_handler_after_the_work_was_left() -> None:
    order: list[str] = []

    def own(number: int, frame: FrameType | None) -> None:
        order.append("handler")

    @interrupt.watched()
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            interrupt.check()
        finally:
            order.append("cleaned up")

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(Interrupted):
            work()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert order == ["cleaned up", "handler"]


# -- in commands ---------------------------------------------------------------------------------------------


def signalled(number: int, then: Callable[[], object]) -> Callable[[list[str] | None], int]:
    def main(argv: list[str] | None) -> int:
        signal.raise_signal(number)
        then()
        return 0

    return main


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_commands_end_with_the_code_of_the_signal(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(signalled(number, interrupt.check)) == code
    assert capsys.readouterr().err == "\ninterrupted\n"


def raises(error: Exception) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize("error", [RuntimeError("connection closed by peer"), UserError("it is gone")])
def test_an_error_after_a_signal_is_not_what_the_user_reads(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(signalled(signal.SIGTERM, raises(error))) == 143
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_command_that_is_done_before_it_could_obey_is_done() -> None:
    assert cli.run(signalled(signal.SIGTERM, lambda: None)) == 0


def test_the_message_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str] | None) -> int:
        with interrupt.keeping(lambda: "the outer"), interrupt.keeping(lambda: "half is kept"):
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
        return 0

    assert cli.run(main, resumes=True) == 130
    assert capsys.readouterr().err == "\ninterrupted; half is kept\n"


def test_a_terminal_that_is_gone_changes_nothing() -> None:
    """Closing it sends SIGHUP; then nothing can be printed any more."""
    code = (
        "import signal\nfrom mrem_deploy.base import cli, interrupt\n"
        "def main(argv):\n    signal.raise_signal(signal.SIGHUP)\n"
        "    print('to a closed pipe', flush=True)\n    interrupt.check()\n"
        "raise SystemExit(cli.run(main))"
    )
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=write, stderr=write, timeout=300, check=False
        )
    finally:
        os.close(write)
    assert done.returncode == 129
