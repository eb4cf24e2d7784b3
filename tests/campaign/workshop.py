"""What all cases share: tiny models and data, the commands to disturb, and their undisturbed results."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaign import forked, judge
from tests.campaign.cases import SILENT, Outcome
from tests.campaign.forked import Ended, Place, Running
from tests.campaign.jobs import JOBS, OUT, Job, result_of
from tests.campaign.writes import Writes

# What a run prints when a stage begins.
STAGES = (
    ("loading", r"^loading "),
    ("calibration", r"initialising scales"),
    ("training", r"(?:targets of|train module|rem block|qat stage|train(?:ing)?)[^\r\n:]*:   0%"),
    ("caching", r"cache after[^\r\n:]*:   0%"),
    ("evaluating", r"evaluate[^\r\n:]*:   0%"),
    ("publishing", r"evaluate dev quantized *: 100%|exporting to ONNX|Writing model shards:   0%"),
)
STAGE = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in STAGES), re.MULTILINE)


@dataclass(frozen=True)
class Baseline:
    """An undisturbed run of a job."""

    job: Job
    folder: Path  # its result
    values: dict[str, str]
    moments: list[tuple[str, float]]  # stages as they began, in seconds from the start
    seconds: float
    writes: int  # how often it wrote in its place


class Workshop:
    """The folder of a campaign; everything in it is made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._baselines: dict[str, Baseline] = {}

    def place(self, name: str) -> Place:
        root = self.root / "cases" / name
        shutil.rmtree(root, ignore_errors=True)
        return Place(root).make()

    def make_inputs(self) -> None:
        if (self.root / "inputs-made").exists():
            return
        import golden

        def make() -> int:
            golden.make_inputs(self.root)
            make_searching(self.root)
            return 0

        ended = forked.run(make, self.place("inputs"))
        if ended.code != 0:
            raise RuntimeError(f"the inputs cannot be made:\n{ended.text}")
        (self.root / "inputs-made").touch()

    def remember(self, what: str, text: str) -> None:
        """Keep what an undisturbed command has said."""
        (self.root / f"{what}.txt").write_text(text, encoding="utf-8")

    def remembered(self, what: str) -> str:
        return (self.root / f"{what}.txt").read_text(encoding="utf-8")

    def baseline(self, name: str) -> Baseline:
        """The undisturbed run of a job, made the first time that it is asked for."""
        if name not in self._baselines:
            self._baselines[name] = self._read_baseline(name) or self._make_baseline(name)
        return self._baselines[name]

    def _read_baseline(self, name: str) -> Baseline | None:
        root = self.root / "baselines" / name
        with contextlib.suppress(OSError):
            kept = json.loads((root / "baseline.json").read_text(encoding="utf-8"))
            return Baseline(JOBS[name], result_of(self.root, name), **kept)
        return None

    def _make_baseline(self, name: str) -> Baseline:
        job, root = JOBS[name], self.root / "baselines" / name
        if job.result:
            self.baseline(job.result)
        shutil.rmtree(root, ignore_errors=True)
        place = Place(root).make()
        out = place.work / OUT
        argv = job.argv(self.root, out)
        moments: list[tuple[str, float]] = []

        def watch(running: Running) -> None:
            def look() -> bool:
                stages = stages_in(running.err())
                now = time.monotonic() - running.started
                moments.extend((stage, now) for stage in stages[len(moments) :])
                return False

            running.wait_for(look)

        ended = run_command(argv, place, watch, writes=Writes(place.work, report=root / "writes"))
        if ended.code != 0:
            raise RuntimeError(
                f"the undisturbed run of {name} ended with {ended.code}:\n{ended.text[-4000:]}"
            )
        counted = int((root / "writes").read_text())
        kept: dict[str, Any] = {
            "values": judge.values_of(out, root),
            "moments": moments,
            "seconds": ended.seconds,
            "writes": counted,
        }
        (root / "baseline.json").write_text(json.dumps(kept), encoding="utf-8")
        return Baseline(job, out, **kept)

    def checkpoints(self, name: str) -> Path:
        """A place in which a run of that job was killed when it began to write its result."""
        root = self.root / "interrupted" / name
        if not (root / "made").exists():
            shutil.rmtree(root, ignore_errors=True)
            place = Place(root).make()
            argv = JOBS[name].argv(self.root, place.work / OUT)
            if JOBS[name].crew:
                ended = run_command(argv, place, _kill_when_written)
            else:
                ended = run_command(argv, place, writes=Writes(place.work, only=f".{OUT}.new-", at=1))
            if ended.code != -signal.SIGKILL:
                raise RuntimeError(f"{name} was not killed:\n{ended.text[-4000:]}")
            for path in place.work.glob(f".{OUT}.new-*"):
                shutil.rmtree(path)
            (root / "made").touch()
        return root


def make_searching(root: Path) -> None:
    """An embedder, a cross-encoder and their data; what `mrem web` would get from npm."""
    from npm_packages import packages
    from tiny_beir import write_collection
    from tiny_embedder import save_embedder, save_reranker

    prompts = {"query": "very good ", "passage": "the film "}
    save_embedder(
        root / "model-retrieval", ["cls", "mean"], 12, settings={"prompts": prompts, "truncate_dim": 10}
    )
    save_reranker(root / "model-reranking")
    for name in ("retrieval", "reranking"):
        write_collection(root / f"data-{name}")
    packages(root / "npm")


def _kill_when_written(running: Running) -> None:
    work = running.place.work
    if running.wait_for(lambda: any(work.glob(f".{OUT}.new-*"))):
        running.send(signal.SIGKILL, group=True)


def stages_in(text: str) -> list[str]:
    """The stages that have begun, in order, by what was printed."""
    return [str(found.lastgroup) for found in STAGE.finditer(text)]


def mrem(argv: list[str]) -> int:
    """`mrem ARGV` in this process."""
    from mrem_deploy.__main__ import main

    return main(argv)


def run_command(
    argv: list[str],
    place: Place,
    disturb: Callable[[Running], None] | None = None,
    writes: Writes | None = None,
    wall: float = forked.WALL_SECONDS,
) -> Ended:
    """`mrem ARGV` in a child."""

    def call() -> int:
        code = mrem(argv)
        if writes is not None:
            writes.finish()
        return code

    before = writes.watch if writes is not None else None
    return forked.run(call, place, disturb, wall, before, ["mrem", *argv])


def prepare_imports(list_of_modules: Path) -> None:
    """Import everything that commands import, also inside functions: children then start with it.

    The first time a child runs the usual commands and reports what it has loaded.
    """
    for name in ("torch", "transformers", "onnxruntime", "onnx", "mrem_deploy.pipeline", "golden"):
        importlib.import_module(name)
    if list_of_modules.exists():
        for name in json.loads(list_of_modules.read_text(encoding="utf-8")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def record_imports(shop: Workshop, list_of_modules: Path) -> None:
    """Run the commands once in a child, and keep the names of the modules that they loaded."""
    if list_of_modules.exists():
        return
    place = shop.place("imports")

    def call() -> int:
        result = place.work / OUT
        options = JOBS["mrem-s-onnx"].options.replace("--modules 2", "--modules 1")
        job = Job("imports", "quantize", options, head="squad")
        mrem(job.argv(shop.root, result))
        mrem(["validate", str(result)])
        mrem(["verify", str(result)])
        mrem(JOBS["finetune"].argv(shop.root, place.work / "tuned"))
        known = [name for name in sys.modules if not name.startswith(("__m", "tests."))]
        list_of_modules.write_text(json.dumps(known), encoding="utf-8")
        return 0

    ended = forked.run(call, place)
    if ended.code != 0:
        raise RuntimeError(f"the commands do not run undisturbed:\n{ended.text[-4000:]}")
    shutil.rmtree(place.root, ignore_errors=True)


def copy_tree(source: Path, to: Path) -> None:
    shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True)


def check_result(outcome: Outcome, baseline: Baseline, place: Place) -> None:
    """Blame a result that is not that of the undisturbed run."""
    out = place.work / OUT
    try:
        found = judge.values_of(out, place.root)
    except Exception as error:  # noqa: BLE001 (whatever is wrong with the files)
        outcome.blame(SILENT, f"exit code 0, but the result cannot be read: {error!r}")
        return
    if baseline.job.same_bits:
        different = judge.differing(found, baseline.values)
    else:
        different = [] if found["files"] == baseline.values["files"] else ["the list of files"]
    if different:
        outcome.blame(SILENT, f"differs from the undisturbed run: {', '.join(different[:6])}")


def single_threaded() -> None:
    """Before anything is imported: children are forked, so no library may have started threads."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        MPLBACKEND="agg",
    )
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # see the Makefile
