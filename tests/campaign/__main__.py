"""`python -m tests.campaign`: disturb the commands in thousands of ways and count what they survive.

Tiny models, real commands: runs are killed, interrupted and continued; disks become full; result folders,
checkpoints, options and data files are damaged or hostile. Everything is drawn from --seed. The log has a
line of JSON for every case, so a second start goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests" / "helpers")) if path not in sys.path]

from tests.campaign import page  # noqa: E402 (needs the path)
from tests.campaign.cases import FAULTS, KINDS, Case, Outcome, all_cases, read_log  # noqa: E402

LIMIT_SECONDS = 1800  # of one case, its judgement included
EXAMPLES = """\
examples:
  python -m tests.campaign                              all cases; goes on where it was interrupted
  python -m tests.campaign --minutes 5 --seed 1         a part with its share of every kind
  python -m tests.campaign --kinds damage,input
  python -m tests.campaign --only damage-0042           one case once more, with all that it prints
"""


def build_parser() -> argparse.ArgumentParser:
    kinds = "\n".join(
        f"  {name:<8}{kind.count:>5} {kind.title}: {kind.promise}" for name, kind in KINDS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign",
        description=__doc__,
        epilog=f"kinds:\n{kinds}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=0, help="decides every case (default 0)")
    add(
        "--minutes",
        type=float,
        help="start no case after that time, counted from the first; 0: only the table of what was tried",
    )
    add("--kinds", default=",".join(KINDS), help="which kinds, with commas between them (default all)")
    add("--only", metavar="CASE", help="only this case, once more, whatever the log says")
    add("--processes", type=int, default=2, help="cases at a time (default 2)")
    add("--folder", type=Path, help="where the log and the shared files are (default build/campaign)")
    add("--fresh", action="store_true", help="forget the log and the shared files of earlier starts")
    add("--write-docs", action="store_true", help="also put the table into docs/reliability.md")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    kinds = tuple(filter(None, options.kinds.split(",")))
    if unknown := set(kinds) - KINDS.keys():
        print(f"error: there is no kind {sorted(unknown)[0]!r}; expected {', '.join(KINDS)}", file=sys.stderr)
        return 2
    if not sys.platform.startswith("linux"):
        print("error: the campaign needs Linux: it follows processes by /proc", file=sys.stderr)
        return 2
    try:
        cases = [Case.parse(options.only)] if options.only else all_cases(kinds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = (options.folder or ROOT / "build" / "campaign").resolve() / f"seed-{options.seed}"
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    campaign = Campaign(folder, options.seed, options.processes, options.minutes, bool(options.only))
    outcomes = campaign.run(cases)
    print(f"\n{page.terminal(outcomes)}")
    if (sentence := page.leaving(outcomes)) is not None:
        print(sentence)
    if options.write_docs:
        page.write(ROOT / "docs" / "reliability.md", page.markdown(outcomes, "make faults", options.seed))
    return 0 if outcomes and all(outcome.survived for outcome in outcomes) else 1


@dataclass
class Campaign:
    """The cases of one seed, several at a time, each judged in a process of its own."""

    folder: Path
    seed: int
    processes: int
    minutes: float | None
    verbose: bool

    def run(self, cases: list[Case]) -> list[Outcome]:
        """Try what the log does not have yet; returns everything that is known of these cases."""
        log = self.folder / "log.jsonl"
        known = {} if self.verbose else read_log(log)
        wanted = {case.id for case in cases}
        missing = [case for case in cases if case.id not in known and self.minutes != 0]
        if missing:
            self._prepare({case.kind for case in missing})  # takes longer where nothing is there yet
        deadline = math.inf if self.minutes is None else time.monotonic() + self.minutes * 60
        running: dict[int, tuple[Case, float]] = {}
        try:
            while missing or running:
                if time.monotonic() >= deadline:
                    missing = []
                while missing and len(running) < self.processes:
                    case = missing.pop(0)
                    running[self._start(case)] = (case, time.monotonic())
                for pid, (case, started) in list(running.items()):
                    outcome = self._collect(pid, case, started)
                    if outcome is None:
                        continue
                    del running[pid]
                    known[case.id] = outcome
                    if not self.verbose:
                        with log.open("a", encoding="utf-8") as file:
                            file.write(outcome.line() + "\n")
                    self._show(outcome, len(missing) + len(running))
                time.sleep(0.01)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on from here", file=sys.stderr)
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
        return [known[case] for case in sorted(known) if case in wanted]

    def _prepare(self, kinds: set[str]) -> None:
        """Import everything and make what the cases share."""
        from tests.campaign import damage, jobs, workshop

        workshop.single_threaded()
        self._say("importing what the commands import")
        modules = self.folder / "modules.json"
        workshop.prepare_imports(modules)
        self.shop = workshop.Workshop(self.folder)
        self.shop.make_inputs()
        if not modules.exists():
            workshop.record_imports(self.shop, modules)
            workshop.prepare_imports(modules)
        needed = set(jobs.ALONE) if kinds & {"kill", "signal", "disk"} else set()
        needed |= set(jobs.CREWS) if kinds & {"crew", "signal"} else set()
        needed |= {*damage.RESULTS, *damage.INTERRUPTED} if "damage" in kinds else set()
        needed |= {"ptq"} if "option" in kinds else set()
        for more in ("older", "result"):
            needed |= {getattr(jobs.JOBS[name], more) for name in needed} - {""}
        self._say(f"undisturbed runs: {', '.join(sorted(needed))}")
        readers = {name for name in needed if jobs.JOBS[name].result}
        self._each(self.shop.baseline, needed - readers)
        self._each(self.shop.baseline, readers)
        if "damage" in kinds:
            self._say(f"undamaged results and interrupted runs: {', '.join(damage.INTERRUPTED)}")
            self._each(self.shop.checkpoints, set(damage.INTERRUPTED))
            self._each(partial(damage.remember, self.shop), set(damage.RESULTS))

    def _each(self, make: Callable[[str], object], names: set[str]) -> None:
        """Let children make what is missing, several at a time; it is kept in files."""
        waiting, running = sorted(names), set[int]()
        while waiting or running:
            while waiting and len(running) < self.processes:
                name = waiting.pop()
                running.add(self._fork(lambda name=name: make(name)))  # type: ignore[misc]
            pid, status = os.wait()
            if pid not in running:
                continue  # an orphan of a command that was killed
            running.remove(pid)
            if status != 0:
                raise RuntimeError("the commands do not run undisturbed; see above")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _start(self, case: Case) -> int:
        """A process that runs and judges one case; its outcome is in a file."""
        result = self.folder / f"{case.id}.json"
        result.unlink(missing_ok=True)

        def judge() -> None:
            result.write_text(try_case(self.shop, case, self.seed).line(), encoding="utf-8")

        return self._fork(judge)

    def _fork(self, call: Callable[[], object]) -> int:
        """Call in a child; its exit code is 0 if nothing was raised."""
        from tests.campaign.forked import end_with_parent

        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                end_with_parent()
                os.setpgid(0, 0)
                call()
                code = 0
            except BaseException:  # noqa: BLE001 (the parent raises)
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    def _collect(self, pid: int, case: Case, started: float) -> Outcome | None:
        """The outcome of a case that is over. A judge that fails is a fault of the campaign: it is raised."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            if time.monotonic() - started > LIMIT_SECONDS:
                os.killpg(pid, signal.SIGKILL)
            return None
        result = self.folder / f"{case.id}.json"
        if status != 0 or not result.exists():
            raise RuntimeError(f"the judge of {case.id} failed; see above")
        outcome = Outcome(**json.loads(result.read_text(encoding="utf-8")))
        result.unlink()
        return outcome

    def _show(self, outcome: Outcome, left: int) -> None:
        if outcome.survived:
            words = f"{outcome.result or 'survived'} ({outcome.seconds:.1f} s, {left} to go): {outcome.what}"
        else:
            words = "; ".join(f"{fault.upper()}: {reason}" for fault, reason in outcome.faults.items())
            again = f"python -m tests.campaign --seed {self.seed} --only {outcome.case}"
            words = f"{words}: {outcome.what}\n    {again}"
        print(f"{outcome.case} {words}"[:2000], file=sys.stderr, flush=True)
        if self.verbose:
            print(outcome.output, file=sys.stderr)


def try_case(shop: object, case: Case, seed: int) -> Outcome:
    """Run one case in its own folder."""
    from tests.campaign import damage, disks, inputs, interruptions, option_sets
    from tests.campaign.forked import Place
    from tests.campaign.workshop import Workshop

    assert isinstance(shop, Workshop)
    tries: dict[str, Callable[..., None]] = {
        "kill": interruptions.kill,
        "crew": interruptions.kill_crew,
        "signal": interruptions.interrupt,
        "disk": disks.fill,
        "damage": damage.damage,
        "option": option_sets.try_options,
        "input": inputs.hostile,
    }
    place: Place = shop.place(case.id)
    outcome, started = Outcome(case.id), time.monotonic()
    tries[case.kind](shop, place, case.draw(seed), outcome)
    outcome.seconds = round(time.monotonic() - started, 2)
    assert set(outcome.faults) <= set(FAULTS)
    shutil.rmtree(place.root, ignore_errors=True)
    return outcome


if __name__ == "__main__":
    raise SystemExit(main())
