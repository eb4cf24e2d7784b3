"""Accuracy, size and speed of quantized models next to what a user would pick instead, in one picture.

RESULT is a result folder of `mrem quantize`; give several if they come from the same full-precision model and
task. The rivals are made from that model: onnxruntime in full precision (ORT fp32), quantize_dynamic and
quantize_static. Every model is scored on the task's evaluation split and timed on the CPU in interleaved
rounds. With --out, writes compare.json, compare.md, compare.png and compare.svg.

--from FILE reads an earlier compare.json. Without RESULT it draws the picture again and measures nothing.
With RESULT it keeps the scores and measures only size and latency, for example on a quieter machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.scratch import scratch_folder
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.benchmarks.compare_rows import BASE, Conditions, Entry, Score, Speed, read, table_and_notes

if TYPE_CHECKING:
    from mrem_deploy.benchmarks.latency.contenders import Contender
    from mrem_deploy.benchmarks.latency.subject import Subject
    from mrem_deploy.benchmarks.output import Result
    from mrem_deploy.recipe import Recipe

EXAMPLES = """\
examples:
  python -m mrem_deploy.benchmark compare result-448 result-228 --out results
  python -m mrem_deploy.benchmark compare result-448 result-228 --from results/compare.json --out results
  python -m mrem_deploy.benchmark compare --from results/compare.json --out results
"""
DEFAULTS = {
    "shape": opt.Default("1x128", "1x32"),
    "rounds": opt.Default(30, 5),
    "warmup": opt.Default(3, 1),
    "eval_size": opt.Default(0, 200),
}
NAME = "compare"
AGAINST = ("flips", "flips_error", "kl", "kl_error", "cosine", "overlap", "overlap_error", "rank")
CALIBRATION_SENTENCES = 128  # for quantize_static, drawn from the training split
# By default quantize_static quantizes every operator, LayerNorm and softmax included, and loses many points
# (docs/latency.md). This is the stronger rival.
STATIC_OPERATORS = ("MatMul", "Gemm", "Gather")


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(flag: str, read: Callable[[str], Any], help: str) -> None:
        opt.add_option(parser, flag, read, help, DEFAULTS)

    parser.add_argument("folders", nargs="*", metavar="RESULT", help="result folders of mrem quantize")
    parser.add_argument("--from", dest="source", metavar="FILE", help="compare.json of an earlier run")
    parser.add_argument("--model", help="where the full-precision model is now, if it has moved")
    parser.add_argument("--data", help="where the task's data is now, if it has moved")
    parser.add_argument("--eval-data", help="where the evaluation file is now, if it has moved")
    add("--eval-size", opt.whole("--eval-size", 0), "random examples of the evaluation split; 0: all")
    add("--shape", _shape_text, "batch x tokens of a timed run; the batch is also that of the scored runs")
    parser.add_argument(
        "--threads",
        dest="session_threads",
        type=opt.whole("--threads", 1, opt.MOST_THREADS),
        default=1,
        help="threads of one onnxruntime session (default 1)",
    )
    add("--rounds", opt.whole("--rounds", 1), "timed rounds, one run of each model per round")
    add("--warmup", opt.whole("--warmup", 1), "rounds before the timed ones")
    opt.add_places(parser)


def _shape_text(text: str) -> str:
    from mrem_deploy.benchmarks.latency.settings import read_shape

    return str(read_shape(text))


def run(options: argparse.Namespace) -> Result:
    from mrem_deploy.benchmarks.compare_plot import draw
    from mrem_deploy.benchmarks.output import Result

    opt.fill_in(options, DEFAULTS)
    earlier = None if options.source is None else read(Path(options.source))
    if options.folders:
        conditions, entries = measure(options, earlier)
    elif earlier is None:
        raise UserError("no result folder was given", "name at least one, or draw again with --from FILE")
    else:
        conditions, entries = earlier
    table, summary = table_and_notes(conditions, entries)
    return Result(
        NAME,
        asdict(conditions),
        [entry.to_dict() for entry in entries],
        table,
        summary,
        lambda: draw(conditions, entries),
        formats=("png", "svg"),
        markdown=f"{table}\n\n{summary}\n",
        drawn_again=not options.folders,
    )


# -- measuring ---------------------------------------------------------------------------------------------


def measure(
    options: argparse.Namespace, earlier: tuple[Conditions, list[Entry]] | None
) -> tuple[Conditions, list[Entry]]:
    """Make the rivals, score all models (or take the scores of `earlier`), then time them."""
    from mrem_deploy.base import machine
    from mrem_deploy.base.progress import say
    from mrem_deploy.benchmarks.latency import lineup
    from mrem_deploy.benchmarks.latency import subject as subjects
    from mrem_deploy.benchmarks.latency.settings import read_shape

    lineup.check_installed(())
    recipes = _recipes([Path(folder) for folder in options.folders], options)
    first, recipe = next(iter(recipes.items()))
    shape = read_shape(options.shape)
    subject = subjects.from_folder(first, options.model, options.data, options.seed)
    with scratch_folder("compare") as work:
        contenders = _contenders(subject, recipes, work, options.seed)
        digests = {contender.name: _digest_of(contender) for contender in contenders if contender.ours}
        if earlier is None:
            where, scores = _score(contenders, recipe, subject, shape.batch, options.session_threads)
        else:
            where, scores = _earlier_scores(earlier, recipe, subject, digests)
            say(f"scores are those of {options.source}")
        speeds = _time(contenders, options, subject.vocabulary)
        sizes = {contender.name: contender.file_mb for contender in contenders}
    conditions = Conditions(
        model=Path(str(recipe.model)).name,
        task=str(recipe.task),
        **where,
        shape=str(shape),
        threads=options.session_threads,
        rounds=options.rounds,
        cpu=str(machine.describe_machine()["cpu"]),
    )
    return conditions, [
        Entry(c.name, c.ours, sizes[c.name], scores[c.name], speeds[c.name], digests.get(c.name))
        for c in contenders
    ]


def _recipes(folders: Sequence[Path], options: argparse.Namespace) -> dict[Path, Recipe]:
    """The recipe of every folder, with the places and the sample that the options name."""
    from mrem_deploy.benchmarks.latency.subject import _recipe as recipe_of

    recipes = {folder: recipe_of(folder) for folder in folders}
    (first, expected), *others = recipes.items()
    for folder, recipe in others:
        for name in ("task", "max_length", *(() if options.model else ("model",))):
            ours, theirs = getattr(recipe, name), getattr(expected, name)
            if ours != theirs:
                raise UserError(
                    f"{folder} and {first} cannot be compared: their {name.replace('_', ' ')} is "
                    f"{ours} and {theirs}",
                    "give results of the same full-precision model and task; --model says where it moved to",
                )
    moved = {name: getattr(options, name) for name in ("model", "data", "eval_data")}
    places = {name: place for name, place in moved.items() if place is not None}
    return {
        folder: replace(recipe, eval_size=options.eval_size, seed=options.seed, **places)
        for folder, recipe in recipes.items()
    }


def _contenders(subject: Subject, recipes: Mapping[Path, Recipe], work: Path, seed: int) -> list[Contender]:
    """Full precision first, then the rivals, then the models of the result folders."""
    from mrem_deploy.base.progress import say
    from mrem_deploy.benchmarks.latency import lineup, rivals
    from mrem_deploy.benchmarks.latency.contenders import Contender
    from mrem_deploy.quant.frozen import FrozenModel

    say("making the rivals")
    tokens = _calibration(next(iter(recipes.values())), subject, seed)
    fp32 = rivals.export_fp32(subject.model, work / "fp32.onnx")
    found = [
        Contender(BASE, fp32),
        Contender("quantize_dynamic", rivals.quantize_dynamically(fp32, work / "dynamic.onnx", False)),
        Contender(
            "quantize_static",
            rivals.quantize_statically(
                fp32, work / "static.onnx", tokens, unsigned=True, operators=STATIC_OPERATORS
            ),
        ),
    ]
    names = _names(recipes)
    for folder in recipes:
        frozen = FrozenModel.read(folder)
        own = replace(subject, frozen={names[folder]: frozen}, folder=folder)
        path = lineup.exported(own, frozen, folder.name, lineup.HEADLINE_PROFILE, work)
        found.append(Contender(names[folder], path, ours=True))
    return found


def _names(recipes: Mapping[Path, Recipe]) -> dict[Path, str]:
    """Bits where they tell the results apart, else also the method, else the folder."""
    for tell in (
        lambda folder, recipe: f"ours {recipe.bits}",
        lambda folder, recipe: f"ours {recipe.bits}, {recipe.method}",
        lambda folder, recipe: f"ours {recipe.bits}, {folder.resolve().name}",
    ):
        names = {folder: tell(folder, recipe) for folder, recipe in recipes.items()}
        if len(set(names.values())) == len(names):
            return names
    raise UserError("two result folders have the same name", "give each folder once")


def _calibration(recipe: Recipe, subject: Subject, seed: int) -> Any:
    from mrem_deploy.data.task_data import sample
    from mrem_deploy.data.texts import encode
    from mrem_deploy.models.loading import load_tokenizer

    assert subject.folder is not None
    texts = sample(_open(recipe).train(), CALIBRATION_SENTENCES, seed)
    return encode(load_tokenizer(subject.folder), texts, recipe.max_length)


def _open(recipe: Recipe) -> Any:
    from mrem_deploy.data.task_data import Columns, open_task

    columns = Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column)
    return open_task(str(recipe.task), str(recipe.data), columns, recipe.eval_data)


def _digest_of(contender: Contender) -> str:
    import onnx

    model = onnx.load(contender.path, load_external_data=False)
    return next((item.value for item in model.metadata_props if item.key == "recipe_digest"), "")


def _evaluation(recipe: Recipe, subject: Subject) -> Any:
    from mrem_deploy.evaluate.evaluation import Evaluation
    from mrem_deploy.models.loading import load_tokenizer

    assert subject.folder is not None
    return Evaluation(recipe, _open(recipe), load_tokenizer(subject.folder), subject.model.config)


def _where(evaluation: Any) -> dict[str, Any]:
    """The first split is the one that counts, as in metrics.json."""
    name, split = next(iter(evaluation.splits.items()))
    return {
        "metric": evaluation.task.metric,
        "split": name,
        "examples": len(split.texts),
        "digest": split.encoded.digest()[:16],
    }


def _score(
    contenders: Sequence[Contender], recipe: Recipe, subject: Subject, batch: int, threads: int
) -> tuple[dict[str, Any], dict[str, Score]]:
    """Every model on the same examples, in batches of the timed size: quantize_dynamic takes its ranges
    from the batch, so its score depends on it."""
    from mrem_deploy.deploy.runtime import check_alike, onnx_predictor, open_session
    from mrem_deploy.evaluate.drift import drift_of
    from mrem_deploy.evaluate.predict import predict

    evaluation = _evaluation(recipe, subject)
    split = next(iter(evaluation.splits.values()))
    metric, scorer = evaluation.task.metric, split.scorer
    rows, scores = {}, {}
    for contender in contenders:
        predictor = onnx_predictor(open_session(contender.path, threads))
        rows[contender.name] = predict(
            predictor, split.encoded, f"score {contender.name}", batch, evaluation.pooling
        )
        base, own = rows[BASE], rows[contender.name]
        check_alike(str(contender.path), own, base)
        agreement, fidelity = scorer.agreement(base, own), scorer.fidelity(base, own)
        against = {name: getattr(fidelity, name) for name in AGAINST}
        if fidelity.overlap is not None:
            drift = drift_of(*scorer.thresholded(base, own))
            against |= {"drift": drift.mean if drift else None}
        if evaluation.task.label_free:
            value = 100.0 if contender.name == BASE else agreement[metric]
            share = next(iter(agreement.values()))
            scores[contender.name] = Score(value, share, value - 100.0, **against)
            continue
        value = scorer.score(own)[metric]
        change = scorer.change(base, own).get(metric, {})
        scores[contender.name] = Score(
            value,
            next(iter(agreement.values())),
            value - scores.get(BASE, Score(value, 100.0, 0.0)).value,
            *(change.get(name) for name in ("standard_error", "low", "high")),
            **against,
        )
    return _where(evaluation), scores


def _earlier_scores(
    earlier: tuple[Conditions, list[Entry]], recipe: Recipe, subject: Subject, digests: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Score]]:
    """Scores of an earlier run, if they belong to the same models and data."""
    conditions, entries = earlier
    known = {entry.name: entry for entry in entries}
    same_model = Path(str(recipe.model)).name == conditions.model and recipe.task == conditions.task
    for name, digest in digests.items():
        if not same_model or name not in known or known[name].recipe_digest != digest:
            raise UserError(
                f"--from: the file has no score of {name} as it is now in its result folder",
                "leave out --from to score the models again",
            )
    kept = ("metric", "split", "examples", "digest")
    return {name: getattr(conditions, name) for name in kept}, {e.name: e.score for e in entries}


def _time(contenders: Sequence[Contender], options: argparse.Namespace, vocabulary: int) -> dict[str, Speed]:
    from mrem_deploy.benchmarks.latency.race import race
    from mrem_deploy.benchmarks.latency.settings import RaceSettings, read_shape

    settings = RaceSettings(
        (read_shape(options.shape),),
        (options.session_threads,),
        options.rounds,
        options.warmup,
        1,
        vocabulary,
        options.seed,
    )
    speeds = {}
    for standing in race(contenders, settings):
        if standing.failed is not None:
            raise UserError(
                f"{standing.contender.name} does not run here: {standing.failed}",
                "`mrem export --help` says which onnxruntime the exported file needs",
            )
        cell = standing.cells[0]
        speeds[standing.contender.name] = Speed(
            cell.p50_ms,
            cell.p95_ms,
            cell.faster.ratio,
            (cell.faster.ratio_quartiles[0], cell.faster.ratio_quartiles[1]),
            tuple(cell.rounds_ms),
        )
    return speeds
