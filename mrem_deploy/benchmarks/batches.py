"""Does a sentence have the same vector in any batch? Results of embedders next to quantize_dynamic.

RESULT is a result folder of an embedder. Sentences of its evaluation split are embedded alone, and then in
random batches, with padding and with other neighbours every time. Models whose activations have static
scales give the same vector up to rounding; quantize_dynamic takes its scales from the whole batch. Vectors
are compared at length 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.benchmarks import options as opt

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from mrem_deploy.benchmarks.output import Result

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark batches result-448 result-228 --out results
  python -m mrem_deploy.benchmark batches result --sentences 64 --batch-size 8
"""
DEFAULTS = {
    "sentences": opt.Default(256, 32),
    "batch_size": opt.Default(32, 8),
    "repeats": opt.Default(3, 2),
}
NAME = "batches"
SAME = 1e-6  # of vectors of length 1: what rounding of float32 in another order may give


@dataclass(frozen=True)
class Steadiness:
    """How far the vectors of one model move between "alone" and "in a batch"."""

    model: str
    ours: bool
    largest: float  # |difference| of a component, over all sentences and batches
    median: float  # of the largest one of each sentence
    distance: float  # the largest 1 − cosine
    moved: float  # percent of sentences that differ by more than rounding
    each: tuple[float, ...]  # the largest one of every sentence


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, help: str) -> None:
        opt.add_option(parser, flag, opt.whole(flag, 2), help, DEFAULTS)

    parser.add_argument("folders", nargs="+", metavar="RESULT", help="result folders of mrem quantize")
    parser.add_argument("--model", help="where the full-precision model is now, if it has moved")
    parser.add_argument("--data", help="where the task's data is now, if it has moved")
    parser.add_argument("--eval-data", help="where the evaluation file is now, if it has moved")
    add("--sentences", "sentences, drawn from the evaluation split")
    add("--batch-size", "sentences of a batch")
    add("--repeats", "times that all sentences are put into other batches")
    parser.add_argument(
        "--threads",
        dest="session_threads",
        type=opt.whole("--threads", 1, opt.MOST_THREADS),
        default=1,
        help="threads of one onnxruntime session (default 1)",
    )
    opt.add_places(parser)
    parser.set_defaults(eval_size=0)


def run(options: argparse.Namespace) -> Result:
    from mrem_deploy.base import machine
    from mrem_deploy.benchmarks.output import Result, table

    opt.fill_in(options, DEFAULTS)
    rows = measure(options)
    head = ("model", "largest difference", "median", "largest 1 − cosine", "sentences that move, %")
    cells = [(row.model, f"{row.largest:.2g}", f"{row.median:.2g}", f"{row.distance:.2g}", f"{row.moved:.1f}")
             for row in rows]  # fmt: skip
    shown = table(head, cells)
    summary = (
        f"{options.sentences} sentences alone and in {options.repeats} random batches of "
        f"{options.batch_size} each; components of vectors of length 1. A sentence moves if one differs by "
        f"more than {SAME:g}; onnxruntime, {machine.describe_machine()['cpu']}."
    )
    return Result(
        NAME,
        opt.as_settings(options),
        [asdict(row) for row in rows],
        shown,
        summary,
        lambda: draw(rows),
        markdown=f"{shown}\n\n{summary}\n",
    )


def measure(options: argparse.Namespace) -> list[Steadiness]:
    """Every model on the same sentences, in the same batches."""
    import numpy as np

    from mrem_deploy.base.progress import say
    from mrem_deploy.benchmarks.compare import _contenders, _evaluation, _recipes
    from mrem_deploy.benchmarks.latency import lineup
    from mrem_deploy.benchmarks.latency import subject as subjects
    from mrem_deploy.deploy.runtime import onnx_predictor, open_session

    lineup.check_installed(())
    recipes = _recipes([Path(folder) for folder in options.folders], options)
    first, recipe = next(iter(recipes.items()))
    subject = subjects.from_folder(first, options.model, options.data, options.seed)
    evaluation = _evaluation(recipe, subject)
    if evaluation.pooling is None:
        raise UserError(
            f"{first} is no result of an embedder; its task is {recipe.task}",
            "give results of --task feature-extraction or retrieval",
        )
    encoded = next(iter(evaluation.splits.values())).encoded
    draw_from = np.random.default_rng(options.seed)
    options.sentences = min(options.sentences, len(encoded))
    some = encoded.take(np.sort(draw_from.choice(len(encoded), options.sentences, replace=False)))
    batches = [
        order[start : start + options.batch_size]
        for order in (draw_from.permutation(len(some)) for _ in range(options.repeats))
        for start in range(0, len(some), options.batch_size)
    ]
    found = []
    with scratch_folder("batches") as work:
        for contender in _contenders(subject, recipes, work, options.seed):
            say(f"embedding alone and in batches: {contender.name}")
            predictor = onnx_predictor(open_session(contender.path, options.session_threads))

            def vectors(chosen: np.ndarray, predictor: Callable[..., Any] = predictor) -> np.ndarray:
                batch = some.batch(chosen)
                return evaluation.pooling(predictor(batch)[0], batch["attention_mask"].numpy())

            found.append(steadiness(contender.name, contender.ours, vectors, len(some), batches))
    return found


def steadiness(
    name: str, ours: bool, vectors: Callable[[np.ndarray], np.ndarray], count: int, batches: list[np.ndarray]
) -> Steadiness:
    """`vectors` gives those of some sentences, in one batch."""
    import numpy as np

    from mrem_deploy.models.sentence_head import unit

    alone = unit(np.concatenate([vectors(np.array([i])) for i in range(count)]).astype(np.float64))
    moved, distance = np.zeros(count), 0.0
    for batch in batches:
        together = unit(vectors(batch).astype(np.float64))
        difference = np.abs(together - alone[batch]).max(axis=1)
        np.maximum.at(moved, batch, difference)
        distance = max(distance, float((1.0 - (together * alone[batch]).sum(axis=1)).max()))
    share = 100.0 * float((moved > SAME).mean())
    median, distance = float(np.median(moved)), max(distance, 0.0)
    return Steadiness(name, ours, float(moved.max()), median, distance, share, tuple(moved.tolist()))


def draw(rows: list[Steadiness]) -> Figure:
    """The largest difference of every sentence, sorted, by model."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in rows:
        heights = np.maximum(np.sort(row.each), 1e-9)
        share = np.linspace(0, 100, len(heights))
        axes.plot(share, heights, label=row.model, linewidth=2.5 if row.ours else 1.5)
    axes.set_yscale("log")
    axes.set_xlabel("sentences, %, sorted")
    axes.set_ylabel("largest difference of a component")
    axes.set_title("The same sentence alone and in a batch")
    axes.legend()
    return figure
