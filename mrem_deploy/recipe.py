"""The recipe: every option of a quantization run, frozen and validated on construction.

A field here is an option of the command line and a key of the YAML recipe at once; its help text
stands beside it. Unknown keys are refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mrem_deploy.base.errors import UserError
from mrem_deploy.data.tasks import defaults_of
from mrem_deploy.kernels.backends import CHOICES as BACKENDS
from mrem_deploy.numerics import ACTIVATION_BITS, EMBEDDING_BITS, FULL_PRECISION, WEIGHT_BITS
from mrem_deploy.quant.quantizers import WEIGHT_QUANTIZERS
from mrem_deploy.quant.spec import QuantSpec

METHODS = ("mrem-s", "mrem-p", "rem", "ptq", "qat")
SENSITIVITIES = ("error", "hessian")
AUTO = "auto"
CURVATURES = ("identity", "adam")
BY_TASK = ("steps", "lr", "max_length")  # their defaults are in tasks.Defaults, filled in on construction


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class Recipe:
    """What to quantize, how, and where to put the result."""

    model: str | None = option(None, "folder or hub id of the fine-tuned model")
    task: str | None = option(
        None,
        "a GLUE task (sst2, mnli, …), squad, squad_v2, text-classification or token-classification; without "
        "labels, measured by how well the results agree: feature-extraction, token-classification (sentences "
        "without tags) or question-answering",
    )
    data: str | None = option(None, "folder, file or hub id of the task's data")
    out: str | None = option(None, "folder for the result; replaced as a whole when the run succeeds")
    bits: str = option(
        "4-4-8",
        "W-E-A: weights 2/3/4/8, embeddings 2/4/8, activations 4/8; 32 leaves it. auto-A: weights and "
        "embeddings of 2/4/8 bits each, by sensitivity, to fit --budget-mb (auto is auto-8)",
    )
    budget_mb: float = option(0.0, "bits auto: MiB that the packed model may take, scales and all")
    sensitivity: str = option(
        "error", "bits auto: what tells how much a layer suffers from few bits", SENSITIVITIES
    )
    method: str = option("mrem-s", "how the quantized model is trained", METHODS)
    modules: str = option("4", "number of modules, or the first block of each but the first: 3,6,9")
    steps: int = option(
        None, "training steps per module (per matrix product for rem) (default 2000; SQuAD 4000)"
    )
    calib_size: int = option(4096, "sentences drawn at random from the training split; no labels needed")
    batch_size: int = option(32, "sentences per step")
    max_length: int = option(None, "tokens per sentence at most (default 128; SQuAD 384)")
    lr: float = option(
        None,
        "learning rate of weights, decays linearly; 1e-3 for a few hundred steps "
        "(default 0.0005; SQuAD 0.00025)",
    )
    step_lr: float = option(1e-3, "learning rate of log step sizes, a relative change per step")
    seed: int = option(0, "draws the calibration sentences and the order of batches")
    per_channel: bool = option(False, "one weight step per output channel instead of one per matrix")
    symmetric: bool = option(False, "no asymmetric activations (for TensorRT)")
    keep_fp: tuple[str, ...] = option((), "name pattern of layers to leave in full precision; repeatable")
    weight_quantizer: str = option(
        "auto", "auto: TWN at 2 bits, LAQ at 4, learned step else", WEIGHT_QUANTIZERS
    )
    curvature: str = option("identity", "what LAQ weights errors with", CURVATURES)
    text_column: str | None = option(None, "column of the sentence, for a file of your own")
    text_pair_column: str | None = option(None, "column of the second sentence")
    label_column: str | None = option(None, "column of the label")
    eval_data: str | None = option(None, "evaluation file, where it does not lie beside the training file")
    eval_size: int = option(
        0, "evaluate on that many random examples of the evaluation split; 0: on all of it"
    )
    staleness: int = option(8, "mrem-p: outputs that the queue between two modules holds")
    teacher_forcing: float = option(
        0.4, "mrem-p: share of the steps until the full-precision input has faded out; 0: none"
    )
    deterministic: bool = option(
        False, "mrem-p: modules in lock-step, queues of one; two runs agree exactly, but modules wait"
    )
    workers: int = option(0, "mrem-p: processes; 0: one per module, at most one per GPU or CPU core")
    max_restarts: int = option(3, "mrem-p: times that all workers are started again after one died")
    worker_timeout: int = option(600, "mrem-p: seconds to wait for another worker before giving up")
    train_size: int = option(
        0, "qat: train on that many random sentences only; 0: on the whole training split"
    )
    qat_epochs: str = option(
        "3+3", "qat: epochs of distilling the layers, then of distilling the predictions"
    )
    qat_lr: float = option(
        1e-4,
        "qat: learning rate of weights, decays linearly in each stage; 2e-5 to 5e-5 for epochs of much data",
    )
    qat_evals: int = option(
        1, "qat: scores on the evaluation split per epoch of the second stage, to choose by"
    )
    accumulate: int = option(1, "qat: micro-batches that --batch-size is split into, to save memory")
    init_batches: int = option(8, "batches watched to initialise the step sizes")
    checkpoint_steps: int = option(250, "steps between checkpoints; 0: at module boundaries only")
    cache_dir: str | None = option(None, "folder for cached activations that exceed --max-memory")
    max_memory: str | None = option(
        None, "memory for cached activations, such as 8GB; default: half of what is free"
    )
    export: str = option(
        "auto",
        "profiles of the ONNX models to write, with commas between them, or none; auto: ort-cpu where the "
        "packages it needs are installed",
    )
    validate: bool = option(True, "let the first exported model answer the evaluation split, too")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    kernels: str = option(
        "auto",
        "what computes the quantized ops; auto: the best that this machine has (mrem doctor)",
        BACKENDS,
    )

    def __post_init__(self) -> None:
        if self.method == "gobo":
            raise UserError(
                "GOBO maps weights to values that lie on no grid: they can be neither packed nor exported",
                "it is a row of comparisons only, made in torch by mrem_deploy.reproduce.gobo.gobo_model",
            )
        defaults = defaults_of(self.task)
        for name in BY_TASK:
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(defaults, name))
        parse_modules(self.modules)
        parse_epochs(self.qat_epochs)
        _check_quantizer(self)
        _check_budget(self)
        for name in ("method", "weight_quantizer", "curvature", "sensitivity", "kernels"):
            choices = _field(name).metadata["choices"]
            if getattr(self, name) not in choices:
                raise _bad(name, f"one of {', '.join(choices)}", getattr(self, name))
        for name in ("steps", "calib_size", "batch_size", "init_batches", "staleness", "worker_timeout",
                     "qat_evals", "accumulate"):  # fmt: skip
            if getattr(self, name) < 1:
                raise _bad(name, "at least 1", getattr(self, name))
        for name in ("seed", "checkpoint_steps", "threads", "eval_size", "workers", "max_restarts",
                     "train_size"):  # fmt: skip
            if getattr(self, name) < 0:
                raise _bad(name, "0 or more", getattr(self, name))
        for name, unset in (("train_size", 0), ("accumulate", 1)):
            if getattr(self, name) != unset and self.method != "qat":
                raise UserError(
                    f"--{name.replace('_', '-')} is for --method qat; the method is {self.method}",
                    "leave it out; --calib-size and --batch-size hold for the other methods",
                )
        if self.max_length < 3:
            raise _bad("max_length", "at least 3 (a token between the two special ones)", self.max_length)
        if not 0 <= self.teacher_forcing <= 1:
            raise _bad("teacher_forcing", "a share between 0 and 1", self.teacher_forcing)
        if self.method == "qat" and self.lr != defaults.lr:
            raise UserError("--lr is for the other methods", "give --qat-lr: a whole model needs a lower one")
        for name in ("lr", "step_lr", "qat_lr"):
            if not 0 < getattr(self, name) < 1:
                raise _bad(name, "a number between 0 and 1", getattr(self, name))
        if self.max_memory is not None:
            parse_megabytes(self.max_memory)

    @property
    def spec(self) -> QuantSpec:
        """What the layers need. With bits `auto` weights stay full precision until they are chosen."""
        weights, embeddings, activations = self._widths
        return QuantSpec(
            weights, embeddings, activations, self.per_channel, self.symmetric,
            self.weight_quantizer, self.curvature, self.keep_fp,
        )  # fmt: skip

    @property
    def chooses_bits(self) -> bool:
        """Whether the bits of every layer are to be chosen under a budget."""
        return str(self.bits).partition("-")[0] == AUTO

    @property
    def _widths(self) -> tuple[int, int, int]:
        if not self.chooses_bits:
            return parse_bits(self.bits)
        activations = str(self.bits).removeprefix(AUTO) or "-8"
        if not activations[1:].isdecimal():
            raise UserError(
                f"--bits {AUTO} may be followed by the bits of activations only; got {self.bits!r}",
                "write --bits auto, auto-8 or auto-4",
            )
        return parse_bits(f"{FULL_PRECISION}-{FULL_PRECISION}{activations}")

    def identity(self) -> dict[str, Any]:
        """What decides the quantized model: a resumed run must agree in all of it.

        Threads, device and kernels are among it: they give the same integers for the same step, but a step's
        gradient may differ in its last bit, and training carries that on.
        """
        places = {"out", "cache_dir", "max_memory", "checkpoint_steps", "export", "validate"}
        places |= {"workers", "max_restarts", "worker_timeout"}
        return {name: value for name, value in self.as_dict().items() if name not in places}

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["keep_fp"] = list(self.keep_fp)
        return values

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


def _field(name: str) -> dataclasses.Field[Any]:
    return next(f for f in dataclasses.fields(Recipe) if f.name == name)


def _bad(name: str, expected: str, came: Any) -> UserError:
    return UserError(
        f"--{name.replace('_', '-')} must be {expected}; got {came!r}", "see --help for examples"
    )


def parse_bits(text: str) -> tuple[int, int, int]:
    """'4-4-8' → (4, 4, 8)."""
    allowed = (("weights", WEIGHT_BITS), ("embeddings", EMBEDDING_BITS), ("activations", ACTIVATION_BITS))
    parts = str(text).split("-")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise UserError(
            f"--bits must be three numbers W-E-A; got {text!r}", "for example --bits 4-4-8 or 2-2-8"
        )
    values = (int(parts[0]), int(parts[1]), int(parts[2]))
    for value, (what, choices) in zip(values, allowed, strict=True):
        if value not in choices:
            listed = ", ".join(str(choice) for choice in choices)
            raise UserError(
                f"{value} bits for {what} are not supported", f"choose among {listed} (32: leave it)"
            )
    return values


def _check_quantizer(recipe: Recipe) -> None:
    """TWN has two bits; the others need a grid of more than three codes to be worth it."""
    bits = AUTO if recipe.chooses_bits else recipe.spec.weight_bits
    if recipe.weight_quantizer == "twn" and bits not in (2, FULL_PRECISION):
        raise UserError(f"--weight-quantizer twn is for 2-bit weights; got {bits}", "use laq or uniform")


def _check_budget(recipe: Recipe) -> None:
    """A budget and bits to choose go together."""
    if not 0 <= recipe.budget_mb < float("inf"):
        raise _bad("budget_mb", "a size in MiB", recipe.budget_mb)
    if recipe.chooses_bits and not recipe.budget_mb:
        raise UserError(
            f"--bits {recipe.bits} needs a size to keep to", "give one in MiB, such as --budget-mb 12"
        )
    if recipe.budget_mb and not recipe.chooses_bits:
        raise UserError(
            f"--budget-mb has no say over --bits {recipe.bits}", "leave it out, or give --bits auto"
        )


def parse_epochs(text: str) -> tuple[float, float]:
    """'3+3' → (3.0, 3.0); one of the stages may be left out by 0."""
    try:
        first, second = (float(part) for part in str(text).split("+"))
    except ValueError:
        first = second = float("nan")
    if not (0 <= first < 1000 and 0 <= second < 1000 and first + second > 0):
        raise _bad("qat_epochs", "epochs of both stages, such as 3+3 or 0.5+1", text)
    return first, second


def parse_modules(text: str) -> int | list[int]:
    """'4' → 4 modules; '3,6,9' → modules that begin at blocks 0, 3, 6 and 9."""
    parts = [part for part in str(text).strip("[]").replace(" ", "").split(",") if part]
    if not parts or not all(part.isdecimal() for part in parts) or parts == ["0"]:
        raise UserError(
            f"--modules must be a count or cut points; got {text!r}", "for example --modules 4 or 3,6,9"
        )
    return [int(part) for part in parts] if "," in str(text) else int(parts[0])


def module_count(text: str) -> int:
    """How many modules `--modules` asks for."""
    modules = parse_modules(text)
    return modules if isinstance(modules, int) else len(modules) + 1


def parse_megabytes(text: str) -> float:
    """'8GB' → 8192.0."""
    units = {"GB": 1024.0, "MB": 1.0, "G": 1024.0, "M": 1.0}
    upper = str(text).strip().upper()
    unit = next((u for u in units if upper.endswith(u)), None)
    try:
        value = float(upper.removesuffix(unit)) * units[unit] if unit else float("nan")
    except ValueError:
        value = float("nan")
    if not value >= 0:
        raise UserError(
            f"--max-memory must be a size such as 8GB or 500MB; got {text!r}", "give a number and GB or MB"
        )
    return value


def from_yaml(path: Path) -> dict[str, Any]:
    """The keys of a recipe file; a key we do not know is an error, not a silent default."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no recipe file {path}", "check the path given to --config") from None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read as YAML: {error}", "see recipe.yaml in any result folder"
        ) from error
    values = {} if values is None else values  # an empty file
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold `option: value` lines", "see recipe.yaml in any result folder")
    known = {f.name for f in dataclasses.fields(Recipe)}
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(
            f"{path} has unknown options: {', '.join(unknown)}", f"known are {', '.join(sorted(known))}"
        )
    return values


def make_recipe(values: dict[str, Any]) -> Recipe:
    """A recipe from YAML or command-line values, each converted to the type of its field."""
    hints = typing.get_type_hints(Recipe)
    return Recipe(**{name: _convert(name, value, hints[name]) for name, value in values.items()})


def _convert(name: str, value: Any, hint: Any) -> Any:
    optional = isinstance(hint, types.UnionType)
    if value is None:
        if optional:
            return None
        raise _bad(name, "given", value)
    kind = typing.get_args(hint)[0] if optional else hint
    if kind == tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise _bad(name, "a pattern or a list of patterns", value)
        return tuple(items)
    if kind is bool:
        if not isinstance(value, bool):
            raise _bad(name, "true or false", value)
        return value
    if name == "modules" and isinstance(value, list):
        return ",".join(str(item) for item in value) + ("," if len(value) == 1 else "")
    try:
        # YAML reads an unquoted `yes` as true and 2024-01-01 as a date: no text, and no number either.
        if not isinstance(value, str | int | float | os.PathLike) or isinstance(value, bool):
            raise TypeError
        if kind is int and (isinstance(value, os.PathLike) or int(value) != float(value)):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise _bad(
            name, {int: "a whole number", float: "a number"}.get(kind, "text (in quotes)"), value
        ) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every field of the recipe as an option; absent ones do not override the YAML file."""
    hints = typing.get_type_hints(Recipe)
    for item in dataclasses.fields(Recipe):
        flag, help_text = f"--{item.name.replace('_', '-')}", item.metadata["help"]
        default = argparse.SUPPRESS
        if hints[item.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=help_text)
        elif item.name == "keep_fp":
            parser.add_argument(flag, action="append", metavar="PATTERN", default=default, help=help_text)
        else:
            shown = "" if item.default is None else f" (default {item.default})"
            metavar = "|".join(item.metadata["choices"]) if item.metadata["choices"] else item.name.upper()
            parser.add_argument(flag, default=default, metavar=metavar, help=help_text + shown)
