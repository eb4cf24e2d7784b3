"""Kills and signals at random moments of a run, and the way to continue it."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.campaign import forked, judge
from tests.campaign.cases import HANG, LEFTOVER, MESSAGE, SILENT, Outcome
from tests.campaign.forked import Ended, Place, Running
from tests.campaign.jobs import ALONE, CREWS, OUT
from tests.campaign.workshop import Baseline, Workshop, check_result, copy_tree, run_command, stages_in
from tests.campaign.writes import Writes

TRIES = 4  # a run may be over before it is disturbed; then the moment is chosen earlier
LEAVE_SECONDS = 2.0  # what is promised on a free machine
WORK = f".{OUT}.work"
START, LISTENING = -1, -2  # orders of moments: the start of the process; since it listens to signals
INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass(frozen=True)
class Moment:
    """In which stage of a run, and how many seconds after it began."""

    stage: str
    order: int  # of the stage among all that are printed; or one of those below
    seconds: float

    def reached(self, running: Running) -> bool:
        """Wait for it; False if the command is over before."""
        if not running.wait_for(lambda: self._begun(running)):
            return False
        end = time.monotonic() + self.seconds
        return running.wait_for(lambda: time.monotonic() >= end)

    def _begun(self, running: Running) -> bool:
        if self.order == START:
            return True
        if self.order == LISTENING:
            return running.listens_to(signal.SIGTERM)
        return len(stages_in(running.err())) > self.order

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s into {self.stage}"


def any_moment(draw: random.Random, baseline: Baseline) -> Moment:
    """Every stage is as likely as any other, however short it is."""
    begun = [("starting", 0.0), *baseline.moments]
    stage = draw.choice(sorted({name for name, _ in begun}))
    order = draw.choice([place for place, (name, _) in enumerate(begun) if name == stage])
    ends = [*(seconds for _, seconds in begun), baseline.seconds]
    return Moment(stage, order - 1, draw.random() * max(0.0, ends[order + 1] - ends[order]))


def importing(draw: random.Random) -> Moment:
    """While a new interpreter imports the libraries, after it has begun to listen to signals."""
    return Moment("importing", LISTENING, draw.uniform(0.0, 5.0))


# -- kills -------------------------------------------------------------------------------------------------


def kill(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """Kill a run once or twice, at a moment or at a write, and continue it."""
    baseline = shop.baseline(draw.choice(ALONE))
    earlier = _earlier_result(shop, place, draw, baseline)
    what = [baseline.job.name]
    for _ in range(2 if draw.random() < 0.3 else 1):
        if draw.random() < 0.5:
            write = draw.randint(1, baseline.writes)
            what.append(f"killed at write {write}")
            ended = _command(shop, baseline, place, writes=Writes(place.work, at=write))
        else:
            moment = any_moment(draw, baseline)
            what.append(f"killed {moment}")
            ended = _command(shop, baseline, place, _kill_at(moment, lambda running: running.pid))
        outcome.what = ", ".join(what)
        if ended.code == 0:  # it had less to do than the undisturbed run: it was continued
            break
        judge.check_end(outcome, ended, (), killed=True)
        _check_place(outcome, place, earlier, baseline)
    if ended.code != 0:
        _continue(shop, baseline, place, draw, outcome)
    else:
        _check_end(shop, baseline, place, outcome, ended)


def kill_crew(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """Kill the first process, one of those it started, or all of them."""
    baseline = shop.baseline(draw.choice(CREWS))
    moment, target = any_moment(draw, baseline), draw.choice(("launcher", "any", "any", "all"))
    outcome.what = f"{baseline.job.name}, {target} killed {moment}"

    def victim(running: Running) -> int | None:
        if target == "all":
            return None
        return running.pid if target == "launcher" else draw.choice(running.family())

    ended = _command(shop, baseline, place, _kill_at(moment, victim))
    if ended.code == -signal.SIGKILL:
        judge.check_end(outcome, ended, (), killed=True)
    else:  # a worker was killed: all start again, or the run reports it
        judge.check_end(outcome, ended, (judge.DONE, judge.FAILED))
    if ended.code == judge.DONE:
        _check_end(shop, baseline, place, outcome, ended)
    else:
        _continue(shop, baseline, place, draw, outcome)


def _kill_at(moment: Moment, victim: Callable[[Running], int | None]) -> Callable[[Running], None]:
    def disturb(running: Running) -> None:
        if moment.reached(running):
            target = victim(running)
            running.send(signal.SIGKILL, target, group=target is None)

    return disturb


# -- signals -----------------------------------------------------------------------------------------------


def interrupt(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """SIGINT or SIGTERM, once or twice, to the process or to its group."""
    name = draw.choice(CREWS) if draw.random() < 0.15 else draw.choice(ALONE)
    baseline = shop.baseline(name)
    number = draw.choice(list(INTERRUPTED))
    group, twice = draw.random() < 0.5, draw.random() < 0.3
    pause = draw.uniform(0.05, 1.5)
    new = draw.random() < 0.06  # an interpreter that has imported nothing yet
    moment = importing(draw) if new else any_moment(draw, baseline)
    if moment.order == START:  # before that, no program can obey
        moment = Moment(moment.stage, LISTENING, moment.seconds)
    for _ in range(TRIES):
        words = f"{signal.Signals(number).name} {'twice' if twice else 'once'} to the "
        outcome.what = f"{name}, {words}{'group' if group else 'process'} {moment}"
        sent = []

        def disturb(running: Running, moment: Moment = moment, sent: list[bool] = sent) -> None:
            if not moment.reached(running):
                return
            sent.append(True)
            running.send(number, group=group)
            end = time.monotonic() + pause
            if twice and running.wait_for(lambda: time.monotonic() >= end):
                running.send(number, group=group)

        ended = _command(shop, baseline, place, disturb, new=new)
        if sent:
            break
        _clear(place)
        moment = Moment(moment.stage, moment.order, moment.seconds / 3)
    check_left(place, outcome, ended, number, twice)
    if ended.code == judge.DONE:
        _check_end(shop, baseline, place, outcome, ended)
    else:
        _continue(shop, baseline, place, draw, outcome)


def check_left(place: Place, outcome: Outcome, ended: Ended, number: signal.Signals, twice: bool) -> None:
    """An interrupted run says what is kept, leaves nothing else, and is quick."""
    finished = (place.work / OUT).exists()
    codes = (INTERRUPTED[number], judge.DONE) if finished else (INTERRUPTED[number],)
    good = judge.check_end(outcome, ended, codes)
    outcome.leave_seconds = round(ended.seconds, 2)
    if ended.seconds > allowed_seconds():
        outcome.blame(HANG, f"took {ended.seconds:.1f} s to leave; {allowed_seconds():.0f} s are allowed")
    if not good or twice or ended.code == judge.DONE:
        return
    kept = (place.work / WORK).exists()
    said = ended.err.rpartition("interrupted")[2]
    if "interrupted" not in ended.err:
        outcome.blame(MESSAGE, "does not say that it was interrupted")
    elif kept and "continue" not in said:
        outcome.blame(MESSAGE, "does not say how to continue")
        outcome.output = ended.text[-1500:]
    judge.check_rest(outcome, place, (OUT, WORK), "after the signal")


def allowed_seconds() -> float:
    """Two seconds and some room; as many times longer as more processes than processors want to run."""
    return (LEAVE_SECONDS + 3.0) * forked.crowd()


# -- what both share ---------------------------------------------------------------------------------------


def _command(
    shop: Workshop,
    baseline: Baseline,
    place: Place,
    disturb: Callable[[Running], None] | None = None,
    writes: Writes | None = None,
    new: bool = False,
) -> Ended:
    argv = baseline.job.argv(shop.root, place.work / OUT)
    if new:
        program = [sys.executable, "-m", "mrem_deploy", *argv]
        return forked.run(lambda: os.execv(program[0], program), place, disturb)
    return run_command(argv, place, disturb, writes)


def _clear(place: Place) -> None:
    for folder in (place.work, place.tmp, place.cache):
        shutil.rmtree(folder)
    place.make()


def _earlier_result(shop: Workshop, place: Place, draw: random.Random, baseline: Baseline) -> Path | None:
    """In one of four cases the run replaces an older result, which must stay complete until then."""
    if draw.random() > 0.25 or not baseline.job.older:
        return None
    older = shop.baseline(baseline.job.older).folder
    copy_tree(older, place.work / OUT)
    return older


def _check_place(outcome: Outcome, place: Place, earlier: Path | None, baseline: Baseline) -> None:
    """After a kill the result is the older one, or complete, or not there."""
    marker = place.work / OUT / baseline.job.marker
    if not (place.work / OUT).exists():
        if earlier is not None and not list(place.work.glob(f".{OUT}.old-*")):
            outcome.blame(SILENT, "the older result is gone")
        return
    if earlier is not None and marker.read_bytes() == (earlier / marker.name).read_bytes():
        names = sorted(path.name for path in earlier.iterdir())
        if sorted(path.name for path in marker.parent.iterdir()) != names:
            outcome.blame(SILENT, "a part of the older result is gone")
        return
    check_result(outcome, baseline, place)


def _continue(
    shop: Workshop, baseline: Baseline, place: Place, draw: random.Random, outcome: Outcome
) -> None:
    """The same command again, or the command that the work folder names."""
    if baseline.job.once and (place.work / OUT).exists():  # complete, and never replaced
        check_result(outcome, baseline, place)
        judge.check_rest(outcome, place, (OUT,))
        return
    written = place.work / WORK / "command.txt"
    found = any((place.work / WORK).glob("*.safetensors"))
    argv = baseline.job.argv(shop.root, place.work / OUT)
    if found and written.exists() and draw.random() < 0.5:
        argv = continuing_argv(written.read_text(encoding="utf-8"))
        outcome.what += ", continued by command.txt"
    ended = run_command(argv, place)
    if found and ended.code == judge.DONE and "continuing" not in ended.err:
        outcome.blame(MESSAGE, "found checkpoints, but does not say that it continues")
        outcome.output = ended.text[-1500:]
    _check_end(shop, baseline, place, outcome, ended)


def continuing_argv(command: str) -> list[str]:
    """What follows `mrem` in the command of a work folder."""
    words = shlex.split(command)
    if words[0].endswith("mrem"):
        return words[1:]
    module = words[words.index("-m") + 1]  # python -m mrem_deploy.quantize …
    return [module.rpartition(".")[2], *words[words.index("-m") + 2 :]]


def _check_end(shop: Workshop, baseline: Baseline, place: Place, outcome: Outcome, ended: Ended) -> None:
    if not judge.check_end(outcome, ended, (judge.DONE,)):
        return
    check_result(outcome, baseline, place)
    judge.check_rest(outcome, place, (OUT,))
    if LEFTOVER in outcome.faults or SILENT in outcome.faults:
        outcome.output = outcome.output or ended.text[-1500:]
    outcome.result = "continued"
