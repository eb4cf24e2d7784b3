"""`python -m mrem_deploy.validate DIR`: does the exported ONNX model do what the original did?

The model runs in onnxruntime at its default options over the task's evaluation split, next to full precision
and the quantized model in torch. Exit code 0: passed; 1: the metric fell by more than --max-drop points
below full precision; 2: wrong options or files. DIR/validation.json has every number.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import MOST_THREADS, whole
from mrem_deploy.base.outside import path_of

if TYPE_CHECKING:
    from mrem_deploy.data.task_data import TaskData
    from mrem_deploy.deploy.findings import Findings, OnnxFile, Validation
    from mrem_deploy.evaluate.accuracy import Accuracy
    from mrem_deploy.evaluate.evaluation import Evaluation
    from mrem_deploy.quant.frozen import FrozenModel
    from mrem_deploy.recipe import Recipe

EXIT_FAILED = 1
EXAMPLES = """\
examples:
  python -m mrem_deploy.validate result
  python -m mrem_deploy.validate result --max-drop 0.5 --threads 1
  python -m mrem_deploy.validate result --profile int8 --eval-size 500
  python -m mrem_deploy.validate result --data moved/SST-2 --model moved/my-bert
"""


_OF_RECIPE = ("eval_size", "data", "eval_data", "model", "threshold")


@dataclass(frozen=True)
class Settings:
    """What to validate and how; None means the value in the folder's recipe."""

    folder: Path
    profile: str = "ort-cpu"
    model_file: str | None = None
    max_drop: float = 1.0
    eval_size: int | None = None
    data: str | None = None
    eval_data: str | None = None
    model: str | None = None
    threshold: float | None = None
    batch_size: int = 32
    threads: int = 0
    provider: str = "cpu"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrem validate",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", help="result folder of quantize, with its ONNX file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--profile", default="ort-cpu", help="which of its ONNX files (default ort-cpu)")
    which.add_argument("--model-file", metavar="F", help="an ONNX file by name, in DIR or anywhere else")
    parser.add_argument(
        "--max-drop",
        metavar="X",
        type=_points,
        default=1.0,
        help="points that the metric may fall below full precision on any split (default 1.0)",
    )
    size = "that many random examples of the evaluation split; 0: all (default: as in recipe.yaml)"
    parser.add_argument("--eval-size", metavar="N", type=whole("--eval-size", 0), help=size)
    parser.add_argument("--data", metavar="PATH", help="the task's data, if they moved since")
    parser.add_argument("--eval-data", metavar="PATH", help="the evaluation file, if it moved since")
    parser.add_argument(
        "--model", metavar="PATH", help="the full-precision model, if it moved since or is another"
    )
    parser.add_argument(
        "--threshold",
        metavar="X",
        type=_number,
        help="your program's threshold of scores: how many predictions cross it (default: as in recipe.yaml)",
    )
    parser.add_argument(
        "--batch-size", type=whole("--batch-size", 1), default=32, help="examples at once (default 32)"
    )
    parser.add_argument(
        "--threads",
        type=whole("--threads", 0, MOST_THREADS),
        default=0,
        help="CPU threads; 0: the runtimes' choice",
    )
    parser.add_argument(
        "--provider",
        default="cpu",
        help="onnxruntime's provider: cpu, cuda (with --profile int8), tensorrt (with --profile tensorrt), … "
        "(default cpu); one that does not start is an error",
    )
    return parser


def _points(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UserError(f"--max-drop must be points, 0 or more; got {text!r}", "for example --max-drop 1.0")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"--threshold must be a number; got {text!r}", "for example --threshold 0.5")
    return value


def main(argv: list[str] | None = None) -> int:
    values = vars(build_parser().parse_args(argv))
    settings = Settings(**values | {"folder": path_of("DIR", values["folder"])})
    found = validate(settings)
    print(summary(found))
    return 0 if found.verdict.passed else EXIT_FAILED


def validate(settings: Settings) -> Validation:
    """Validate one ONNX file of a result folder, and write validation.json into it."""
    import torch

    from mrem_deploy.base.files import check_folder, write_json
    from mrem_deploy.base.progress import say
    from mrem_deploy.data.tasks import find_task
    from mrem_deploy.deploy import runtime, validation
    from mrem_deploy.evaluate.accuracy import BY_ONNXRUNTIME, QUANTIZED
    from mrem_deploy.evaluate.drift import check_range
    from mrem_deploy.evaluate.evaluation import Evaluation
    from mrem_deploy.evaluate.predict import torch_predictor
    from mrem_deploy.models.loading import load_tokenizer
    from mrem_deploy.models.sentence_files import sentence_files
    from mrem_deploy.quant.frozen import FrozenModel, build
    from mrem_deploy.result import RECIPE
    from mrem_deploy.result.recipe_file import recipe_has_changed

    folder = settings.folder
    frozen = FrozenModel.read(folder)
    runtime.require("onnx", "onnx_ir", "onnxruntime")
    model = onnx_file(settings)
    recipe = recipe_of(settings)
    check_folder(str(folder))  # where validation.json goes
    batch = max(settings.batch_size, validation.ERROR_EXAMPLES)
    where = runtime.placement(settings.provider, model, batch, recipe.max_length + validation.PADDING)
    runtime.open_session(model, settings.threads, where)  # reports a broken file before reading the data
    if settings.threads:
        torch.set_num_threads(settings.threads)

    say(f"reading the evaluation split of {recipe.task}")
    tokenizer = load_tokenizer(folder)
    check_range(recipe.threshold, find_task(str(recipe.task)).kind)
    sentences = sentence_files(folder, recipe.model or "")
    evaluation = Evaluation(
        recipe, _open_data(recipe), tokenizer, frozen.config, settings.batch_size, sentences
    )
    quantized = build(frozen)
    problem = add_original(evaluation, recipe, frozen.head)
    if problem is None:
        evaluation.check_threshold()
    evaluation.add(QUANTIZED, torch_predictor(quantized))
    found = validation.examine(model, evaluation, quantized, settings.threads, where)
    found = replace(found, both_ways=validation.both_ways(model, evaluation, settings.threads, where))
    if recipe.scored_by == BY_ONNXRUNTIME:
        evaluation.score_by_onnxruntime()
    accuracy = evaluation.accuracy()
    if problem is not None:
        accuracy = _with_original(accuracy, folder, settings, problem)
    notes = origin_notes(found.file, frozen, folder) + validation.runtime_notes(model, where)
    if recipe_has_changed(folder / RECIPE):
        notes.append(f"{RECIPE} has changed since it was written; it names the data and the examples")
    if problem is not None:
        notes.append(f"full precision is quoted from metrics.json: {problem.problem}")
    result = validation.validated(
        found,
        accuracy,
        recipe,
        evaluation.task.name,
        settings.max_drop,
        notes,
        full_precision_from="measured" if problem is None else "metrics.json",
    )
    write_json(folder / validation.RESULT, result.to_dict())
    return result


def origin_notes(file: OnnxFile, frozen: FrozenModel, folder: Path) -> list[str]:
    """Whether the file is the one that was exported from this result, as it was then."""
    notes = []
    recipe = file.recipe_digest in (None, str(frozen.notes.get("recipe_digest")))
    if not recipe or file.result_digest not in (None, frozen.digest):
        notes.append(f"{file.file} was exported from another result than the one in {folder}")
    if file.changed_since_export:
        notes.append(f"{file.file} has changed since it was exported")
    if file.changed_since_export is None:
        notes.append(f"{file.file} carries no SHA-256: another tool wrote it, or an earlier release")
    return notes


def onnx_file(settings: Settings) -> Path:
    """The file that the options name. If it is missing, the error has the command that writes it."""
    from mrem_deploy.export.profiles import find_profile

    if settings.model_file is not None:
        named = path_of("--model-file", settings.model_file)
        choices = [named] if named.is_absolute() else [settings.folder / named, named]
        path = next((path for path in choices if path.is_file()), None)
        if path is None:
            raise UserError(f"there is no ONNX file {settings.model_file}", "check --model-file")
        return path
    profile = find_profile(settings.profile)
    path = profile.path_in(settings.folder)
    if not path.is_file():
        raise UserError(
            f"{settings.folder} has no {path.name}, the ONNX model of profile {profile.name}",
            f"write it first: python -m mrem_deploy.export {settings.folder} --profile {profile.name}",
        )
    return path


def recipe_of(settings: Settings) -> Recipe:
    """The recipe of the folder, with the options of this call."""
    from mrem_deploy.recipe import from_yaml, make_recipe
    from mrem_deploy.result import RECIPE

    path = settings.folder / RECIPE
    if not path.is_file():
        raise UserError(f"{settings.folder} has no {RECIPE}", "copy the whole result folder again")
    recipe = make_recipe(from_yaml(path))
    given = {name: getattr(settings, name) for name in _OF_RECIPE}
    return replace(recipe, **{name: value for name, value in given.items() if value is not None})


def _open_data(recipe: Recipe) -> TaskData:
    from mrem_deploy.data.task_data import Columns, open_task

    columns = Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column)
    try:
        return open_task(str(recipe.task), str(recipe.data), columns, recipe.eval_data)
    except UserError as error:
        raise UserError(
            error.problem,
            f"{error.remedy} If the data moved since, give their new place: --data PATH (--eval-data PATH).",
        ) from error


def add_original(evaluation: Evaluation, recipe: Recipe, head: str) -> UserError | None:
    """Add the predictions of the full-precision model; the error if it cannot be loaded."""
    from mrem_deploy.base.progress import say
    from mrem_deploy.models.loading import load_model

    try:
        teacher, _ = load_model(str(recipe.model), head)
    except UserError as error:
        if evaluation.task.label_free:
            raise UserError(
                f"{evaluation.task.name} is measured against the full-precision model. {error.problem}",
                "give its new place: --model PATH",
            ) from error
        say(f"full precision is quoted from metrics.json: {error.problem}")
        return error
    evaluation.add_full_precision(teacher.requires_grad_(False))
    return None


def _with_original(accuracy: Accuracy, folder: Path, settings: Settings, problem: UserError) -> Accuracy:
    """With the scores of full precision from metrics.json, if they were measured on the same examples."""
    from mrem_deploy.base.strict_json import read_object
    from mrem_deploy.evaluate.accuracy import FULL_PRECISION

    metrics = folder / "metrics.json"
    try:
        earlier = dict(read_object(metrics, "")["accuracy"]["splits"])
    except (UserError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{problem.problem} {metrics}, which would have its numbers, cannot be read either: {error}",
            "give the new place of the full-precision model: --model PATH",
        ) from error
    splits = {}
    for name, split in accuracy.splits.items():
        was = earlier.get(name)
        was = was if isinstance(was, dict) else {}
        moved = settings.data is not None or settings.eval_data is not None
        same = was["digest"] == split.digest if "digest" in was else not moved
        if not same or was.get("examples") != split.examples or FULL_PRECISION not in was:
            raise UserError(
                f"{problem.problem} The number in metrics.json was measured on other examples.",
                "give the new place of the full-precision model (--model PATH), or validate on the examples "
                "of recipe.yaml, without --eval-size, --data and --eval-data",
            )
        splits[name] = replace(split, scores={FULL_PRECISION: was[FULL_PRECISION], **split.scores})
    first = next(iter(splits.values()))
    quoted = {FULL_PRECISION: first.scores[FULL_PRECISION][accuracy.metric], **accuracy.quoted}
    return replace(accuracy, splits=splits, quoted=quoted)


def summary(result: Validation) -> str:
    """The lines to print."""
    from mrem_deploy.base.tables import table
    from mrem_deploy.deploy.findings import table_rows

    found, counted = result.findings, result.findings.census
    file, steady = found.file, found.steadiness
    layers = [(name, f"{error:#.2g}") for name, error in found.layer_errors.items()]
    kinds = ", ".join(f"{count} {kind}" for kind, count in {**counted.integer, **counted.floating}.items())
    lines = [
        table(*table_rows(result)),
        "",
        *_fidelity_lines(found),
        table(("layer", "ONNX − torch, relative"), layers),
        "",
        f"file: {file.file}, {file.size_mb:.1f} MiB, profile {file.profile}, opset {file.opset}",
        f"same prediction as in a batch, of {steady.examples} examples: {steady.alone:.2f}% alone, "
        f"{steady.padded:.2f}% with more padding",
        f"matmuls: {counted.integer_count} run on integers, {counted.floating_count} in float ({kinds})"
        if kinds
        else "matmuls: inside engines of the provider, not counted",
        *_both_ways_lines(found),
        "nodes by provider: " + ", ".join(f"{name} {count}" for name, count in counted.providers.items()),
        *(f"note: {note}" for note in result.notes),
        f"verdict: {result.verdict.sentence}",
    ]
    return "\n".join(lines)


def _both_ways_lines(found: Findings) -> list[str]:
    """With the CPU runtime and without, for a file that has its operators."""
    both = found.both_ways
    if both is None:
        return []
    return [
        f"{both.runtime}; without it, {split}: "
        + ", ".join(f"{name} {value:.2f}" for name, value in both.scores[split].items())
        + f", {next(iter(agreed.values())):.2f}% agreement"
        for split, agreed in both.agreement.items()
    ]


def _fidelity_lines(found: Findings) -> list[str]:
    """How far the predictions of ONNX are from those of the other models."""
    from mrem_deploy.deploy.findings import TITLES

    lines = [
        f"ONNX against {TITLES[other]}, {split}: {fidelity}"
        for other, by_split in found.fidelity.items()
        for split, fidelity in by_split.items()
        if fidelity
    ]
    return [*lines, ""] if lines else []


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
