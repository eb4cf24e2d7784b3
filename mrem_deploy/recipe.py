"""The recipe: every option of a quantization run, frozen and checked when it is made.

A field here is an option of the command line and a key of the YAML recipe at once; its help text stands
next to it. Loads no torch, so that `--help` is quick.

Note: the order of the fields is the order of the keys in recipe.yaml. `--help` and docs/recipe.md sort them
by group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import bad_value, check_options, convert_all, flag, option, read_yaml
from mrem_deploy.data.tasks import TASKS, Defaults, defaults_of
from mrem_deploy.kernels.backends import CHOICES as BACKENDS
from mrem_deploy.numerics import UNQUANTIZED_BITS
from mrem_deploy.quant.spec import USUAL_QUANTIZERS, WEIGHT_QUANTIZERS, QuantSpec
from mrem_deploy.recipe_values import module_count as module_count
from mrem_deploy.recipe_values import parse_bits as parse_bits
from mrem_deploy.recipe_values import parse_epochs as parse_epochs
from mrem_deploy.recipe_values import parse_megabytes as parse_megabytes
from mrem_deploy.recipe_values import parse_modules as parse_modules

METHODS = ("mrem-s", "mrem-p", "rem", "ptq", "qat")
SENSITIVITIES = ("error", "hessian")
CURVATURES = ("identity", "adam")
CENTRINGS = ("auto", "on", "off")
AUTO = "auto"
CENTRED_BITS = 4  # of activations that are centred unless the recipe says otherwise

# The groups of options in the order of `--help`, and what holds for the entire group.
MODEL, BITS, TRAINING, MREM_P = "model and data", "bits", "training", "mrem-p"
QAT, OUTPUT, MACHINE = "qat", "output", "machine"
GROUPS = {
    MODEL: "",
    BITS: "",
    TRAINING: "",
    MREM_P: "only with --method mrem-p",
    QAT: "only with --method qat",
    OUTPUT: "",
    MACHINE: "",
}


def _by_task(name: str) -> str:
    """The defaults of an option as help shows them: the usual one, then those of tasks with another."""
    usual = getattr(Defaults(), name)
    others: dict[Any, list[str]] = {}
    for task in TASKS.values():
        others.setdefault(getattr(task.defaults, name), []).append(task.name)
    others.pop(usual, None)
    return "; ".join([str(usual), *(f"{' and '.join(tasks)} {value}" for value, tasks in others.items())])


@dataclass(frozen=True)
class Recipe:
    """What to quantize, how, and where to put the result.

    `steps`, `lr` and `max_length` take the task's default (`tasks.Defaults`) where they are not given.
    """

    model: str | None = option(None, "folder or hub id of the fine-tuned model", group=MODEL)
    task: str | None = option(
        None,
        "a GLUE task (sst2, mnli, …), squad, squad_v2, text-classification or token-classification. Without "
        "labels: feature-extraction, token-classification (sentences without tags) or question-answering; "
        "the score is then how well the quantized model agrees with the original",
        group=MODEL,
    )
    data: str | None = option(None, "folder, file or hub id of the task's data", group=MODEL)
    out: str | None = option(
        None, "folder for the result; replaced as a whole when the run succeeds", group=OUTPUT, decides=False
    )
    bits: str = option(
        "4-4-8",
        "W-E-A: bits of weights (2, 3, 4, 8), embeddings (2, 4, 8) and activations (4, 8); 32 leaves a part "
        "in full precision. auto-A: chooses 2, 4 or 8 bits for each weight and embedding by sensitivity, so "
        "that the model fits --budget-mb; auto is auto-8",
        group=BITS,
    )
    budget_mb: float = option(
        0.0, "bits auto: MiB that the packed model may take, scales included", group=BITS, shown=""
    )
    sensitivity: str = option(
        "error",
        "bits auto: how to measure what few bits cost a layer",
        group=BITS,
        choices=SENSITIVITIES,
        rare=True,
    )
    method: str = option("mrem-s", "how to train the quantized model", group=TRAINING, choices=METHODS)
    modules: str = option(
        "4", "number of modules, or the first block of each module but the first: 3,6,9", group=TRAINING
    )
    steps: int = option(
        None,
        "training steps per module (with rem: per matmul)",
        group=TRAINING,
        least=1,
        shown=_by_task("steps"),
    )
    calib_size: int = option(
        4096, "sentences drawn at random from the training split; they need no labels", group=MODEL, least=1
    )
    batch_size: int = option(32, "sentences per training step", group=TRAINING, least=1)
    max_length: int = option(None, "tokens per sentence at most", group=MODEL, shown=_by_task("max_length"))
    lr: float = option(
        None,
        "learning rate of the weights, decays linearly; for a few hundred steps use 1e-3",
        group=TRAINING,
        shown=_by_task("lr"),
    )
    step_lr: float = option(
        1e-3,
        "learning rate of the quantizers' scales (step sizes): their relative change per training step",
        group=TRAINING,
        rare=True,
    )
    seed: int = option(0, "draws the calibration sentences and the order of batches", group=TRAINING, least=0)
    per_channel: bool = option(
        False, "one scale per output channel of a weight instead of one per weight", group=BITS
    )
    symmetric: bool = option(False, "only symmetric activations (for TensorRT)", group=BITS)
    keep_fp: tuple[str, ...] = option(
        (), "name pattern of layers to leave in full precision; may be repeated", group=BITS
    )
    weight_quantizer: str = option(
        "auto",
        f"auto: {USUAL_QUANTIZERS[2]} at 2 bits, {USUAL_QUANTIZERS[4]} at 4, {USUAL_QUANTIZERS[8]} (a "
        "learned scale) at 3 and 8. For 2 bits only: twn (three levels) and midrise (four levels, none of "
        "them zero); with midrise, layers of other bits are as with auto",
        group=BITS,
        choices=WEIGHT_QUANTIZERS,
        rare=True,
    )
    curvature: str = option(
        "identity", "how LAQ weights the errors", group=BITS, choices=CURVATURES, rare=True
    )
    centring: str = option(
        "auto",
        "shift activations by the mean of each channel before they are quantized, at no cost at run time; "
        "auto: where activations have 4 bits",
        group=BITS,
        choices=CENTRINGS,
        rare=True,
    )
    text_column: str | None = option(None, "your own file: column of the sentence", group=MODEL)
    text_pair_column: str | None = option(None, "your own file: column of the second sentence", group=MODEL)
    label_column: str | None = option(None, "your own file: column of the label", group=MODEL)
    eval_data: str | None = option(
        None, "evaluation file, where it is not next to the training file", group=MODEL
    )
    eval_size: int = option(
        0, "evaluate on this many random examples of the evaluation split; 0: on all", group=MODEL, least=0
    )
    staleness: int = option(
        8, "outputs that the queue between two modules holds", group=MREM_P, least=1, rare=True
    )
    teacher_forcing: float = option(
        0.4,
        "share of the steps during which the full-precision input fades out; 0: no teacher forcing",
        group=MREM_P,
    )
    deterministic: bool = option(
        False,
        "modules run in lock-step with queues of one: two runs agree exactly, but modules wait",
        group=MREM_P,
    )
    workers: int = option(
        0,
        "processes; 0: one per module, at most one per GPU or CPU core",
        group=MREM_P,
        least=0,
        decides=False,
    )
    max_restarts: int = option(
        3,
        "how often to restart all workers after one died",
        group=MREM_P,
        least=0,
        decides=False,
        rare=True,
    )
    worker_timeout: int = option(
        600,
        "seconds to wait for another worker before giving up",
        group=MREM_P,
        least=1,
        decides=False,
        rare=True,
    )
    train_size: int = option(
        0, "train on this many random sentences; 0: on the entire training split", group=QAT, least=0
    )
    qat_epochs: str = option(
        "3+3", "epochs of distilling the layers, then of distilling the predictions", group=QAT
    )
    qat_lr: float = option(
        1e-4,
        "learning rate of the weights, decays linearly in each stage; with much data use 2e-5 to 5e-5",
        group=QAT,
    )
    qat_evals: int = option(
        1,
        "evaluations per epoch of the second stage; the best model is kept",
        group=QAT,
        least=1,
        rare=True,
    )
    accumulate: int = option(
        1, "split --batch-size into this many micro-batches, to save memory", group=QAT, least=1, rare=True
    )
    init_batches: int = option(8, "batches used to initialize the scales", group=TRAINING, least=1, rare=True)
    checkpoint_steps: int = option(
        250,
        "steps between checkpoints; 0: only when a module is finished",
        group=OUTPUT,
        least=0,
        decides=False,
        rare=True,
    )
    cache_dir: str | None = option(
        None,
        "folder for cached activations that exceed --max-memory",
        group=MACHINE,
        decides=False,
        rare=True,
    )
    max_memory: str | None = option(
        None,
        "memory for cached activations, such as 8GB",
        group=MACHINE,
        shown="half of the free memory",
        decides=False,
        rare=True,
    )
    export: str = option(
        "auto",
        "profiles of the ONNX models to write, separated by commas, or none (mrem export --help lists "
        "them); auto: ort-cpu if the packages it needs are installed",
        group=OUTPUT,
        decides=False,
    )
    validate: bool = option(
        True, "also run the first exported model on the evaluation split", group=OUTPUT, decides=False
    )
    scored_by: str = option(
        "onnxruntime",
        "what gives the scores: the validated ONNX model (torch predicts 512 examples to compare) or torch",
        group=OUTPUT, choices=("onnxruntime", "torch"), decides=False, rare=True,
    )  # fmt: skip
    threads: int = option(0, "CPU threads; 0: torch's choice", group=MACHINE, least=0)
    device: str = option("auto", "auto, cpu, cuda or cuda:N", group=MACHINE)
    kernels: str = option(
        "auto",
        "what computes the quantized ops; auto: the fastest on this machine (see mrem doctor)",
        group=MACHINE,
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        if self.method == "gobo":
            raise UserError(
                "GOBO maps weights to values that lie on no grid: they can be neither packed nor exported",
                "it is for comparison only, in torch: see mrem_deploy.reproduce.gobo.gobo_model",
            )
        defaults = defaults_of(self.task)
        for name in (item.name for item in dataclasses.fields(Defaults)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(defaults, name))
        parse_modules(self.modules)
        parse_epochs(self.qat_epochs)
        _check_quantizer(self)
        _check_budget(self)
        check_options(self)
        for name, unset in (("train_size", 0), ("accumulate", 1)):
            if getattr(self, name) != unset and self.method != "qat":
                raise UserError(
                    f"{flag(name)} is for --method qat; the method is {self.method}",
                    "leave it out; the other methods use --calib-size and --batch-size",
                )
        if self.max_length < 3:
            raise bad_value("max_length", "at least 3 (two special tokens and one more)", self.max_length)
        if not 0 <= self.teacher_forcing <= 1:
            raise bad_value("teacher_forcing", "a share between 0 and 1", self.teacher_forcing)
        if self.method == "qat" and self.lr != defaults.lr:
            raise UserError(
                "--lr is for the other methods; the method is qat",
                "use --qat-lr: training the entire model needs a lower rate",
            )
        for name in ("lr", "step_lr", "qat_lr"):
            if not 0 < getattr(self, name) < 1:
                raise bad_value(name, "a number between 0 and 1", getattr(self, name))
        if self.max_memory is not None:
            parse_megabytes(self.max_memory)

    @property
    def spec(self) -> QuantSpec:
        """What the layers need. With bits `auto` weights stay in full precision until bits are chosen."""
        weights, embeddings, activations = self._widths
        return QuantSpec(
            weights, embeddings, activations, self.per_channel, self.symmetric,
            self.weight_quantizer, self.curvature, self.keep_fp,
        )  # fmt: skip

    @property
    def centres(self) -> bool:
        """Whether activations are shifted by the mean of each channel."""
        activations = self.spec.activation_bits
        return self.centring == "on" or (self.centring == AUTO and activations == CENTRED_BITS)

    @property
    def chooses_bits(self) -> bool:
        """Whether the bits of each layer are chosen to fit a budget."""
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
        return parse_bits(f"{UNQUANTIZED_BITS}-{UNQUANTIZED_BITS}{activations}")

    def identity(self) -> dict[str, Any]:
        """What decides the quantized model: a resumed run must have the same values.

        Threads, device and kernels are part of it: they give the same integers for the same input, but
        gradients may differ in the last bit, and training carries that on.
        """
        decides = {item.name for item in dataclasses.fields(self) if item.metadata["decides"]}
        return {name: value for name, value in self.as_dict().items() if name in decides}

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["keep_fp"] = list(self.keep_fp)
        return values

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


def _check_quantizer(recipe: Recipe) -> None:
    """TWN is for weights of 2 bits, midrise for anything of 2 bits; the others for any bits."""
    bits = AUTO if recipe.chooses_bits else recipe.spec.weight_bits
    if recipe.weight_quantizer == "twn" and bits not in (2, UNQUANTIZED_BITS):
        raise UserError(f"--weight-quantizer twn is for 2-bit weights; got {bits}", "use laq or uniform")
    has_two_bits = recipe.chooses_bits or 2 in (recipe.spec.weight_bits, recipe.spec.embedding_bits)
    if recipe.weight_quantizer == "midrise" and not has_two_bits:
        raise UserError(
            f"--weight-quantizer midrise is for 2 bits, and --bits {recipe.bits} has none",
            "use auto, laq or uniform, or give weights or embeddings 2 bits",
        )


def _check_budget(recipe: Recipe) -> None:
    """A budget and bits to choose go together."""
    if not 0 <= recipe.budget_mb < float("inf"):
        raise bad_value("budget_mb", "a size in MiB", recipe.budget_mb)
    if recipe.chooses_bits and not recipe.budget_mb:
        raise UserError(
            f"--bits {recipe.bits} needs a size for the model", "give it in MiB, for example --budget-mb 12"
        )
    if recipe.budget_mb and not recipe.chooses_bits:
        raise UserError(
            f"--budget-mb has no effect with --bits {recipe.bits}", "leave it out, or use --bits auto"
        )


def from_yaml(path: Path) -> dict[str, Any]:
    """The options that a recipe file sets."""
    return read_yaml(path, Recipe)


def make_recipe(values: dict[str, Any]) -> Recipe:
    """A recipe from values of YAML or the command line."""
    values = dict(values)
    if isinstance(modules := values.get("modules"), list):  # YAML: [3, 6, 9]
        values["modules"] = ",".join(str(item) for item in modules) + ("," if len(modules) == 1 else "")
    return Recipe(**convert_all(Recipe, values))
