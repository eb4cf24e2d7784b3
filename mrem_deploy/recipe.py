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

from mrem_deploy import recipe_groups
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import MOST_SEED, MOST_THREADS, convert_all, option, read_yaml
from mrem_deploy.base.outside import shown
from mrem_deploy.base.yaml_text import dump_yaml
from mrem_deploy.kernels.backends import CHOICES as BACKENDS
from mrem_deploy.numerics import UNQUANTIZED_BITS
from mrem_deploy.quant.spec import USUAL_QUANTIZERS, WEIGHT_QUANTIZERS, QuantSpec
from mrem_deploy.recipe_checks import settle
from mrem_deploy.recipe_defaults import BALANCED, PRESETS, by_bits, by_method, by_preset, by_task
from mrem_deploy.recipe_groups import BITS, MACHINE, MODEL, MREM_P, OUTPUT, QAT, TRAINING
from mrem_deploy.recipe_values import module_count as module_count
from mrem_deploy.recipe_values import parse_bits as parse_bits
from mrem_deploy.recipe_values import parse_duration as parse_duration
from mrem_deploy.recipe_values import parse_epochs as parse_epochs
from mrem_deploy.recipe_values import parse_hot_rows as parse_hot_rows
from mrem_deploy.recipe_values import parse_megabytes as parse_megabytes
from mrem_deploy.recipe_values import parse_modules as parse_modules

METHODS = ("mrem-s", "mrem-p", "rem", "ptq", "qat")
SENSITIVITIES = ("error", "hessian")
CURVATURES = ("identity", "adam")
CENTRINGS = ("auto", "always", "never")
OUTPUT_LOSSES = ("auto", "mse", "kl")
TEACHER_CACHES = ("auto", "never")
AUTO = "auto"
CENTRED_BITS = 4  # of activations that are centred unless the recipe says otherwise


@dataclass(frozen=True)
class Recipe:
    """What to quantize, how, and where to put the result.

    Options that are None follow from others: see `recipe_defaults`.
    """

    model: str | None = option(None, "folder or hub id of the fine-tuned model", group=MODEL)
    task: str | None = option(None, recipe_groups.TASK_HELP, group=MODEL)
    data: str | None = option(None, recipe_groups.DATA_HELP, group=MODEL)
    out: str | None = option(
        None, "folder for the result; replaced as a whole when the run succeeds", group=OUTPUT, decides=False
    )
    bits: str = option(
        "4-4-8",
        "W-E-A: bits of weights (2, 3, 4, 8), embeddings (2, 4, 8) and activations (4, 8); 32 leaves a part "
        "in full precision. auto-A: chooses 2, 4 or 8 bits for each weight and embedding by sensitivity, so "
        "that the model fits --budget-mb or --target-drop; auto is auto-8",
        group=BITS,
    )
    budget_mb: float = option(
        0.0, "bits auto: MiB that the packed model may take, scales included", group=BITS, shown=""
    )
    target_drop: float | None = option(
        None,
        "bits auto: instead of a size, the points that may be lost; finds the smallest model that loses no "
        "more, by an estimate on sentences of the training split (mrem-s, rem, ptq)",
        group=BITS, before=None,
    )  # fmt: skip
    sensitivity: str = option(
        "error", "bits auto: how to measure what few bits cost a layer",
        group=BITS, choices=SENSITIVITIES, rare=True,
    )  # fmt: skip
    method: str = option("mrem-s", "how to train the quantized model", group=TRAINING, choices=METHODS)
    preset: str = option(
        BALANCED,
        "how much to train: sets --steps, --batch-size and --calib-size where they are not given",
        group=TRAINING,
        choices=tuple(PRESETS),
        decides=False,  # what it sets decides
    )
    time_budget: str | None = option(
        None,
        "time for the run, such as 10m or 1h30m: chooses the steps that fit on this machine, at most --steps",
        group=TRAINING,
        before=None,
    )
    modules: str = option(
        "4", "number of modules, or the first block of each module but the first: 3,6,9", group=TRAINING
    )
    steps: int = option(
        None,
        "training steps per module (with rem: per matmul)",
        group=TRAINING,
        least=1,
        shown=by_preset("steps"),
    )
    calib_size: int = option(
        None,
        "sentences drawn at random from the training split; they need no labels",
        group=MODEL,
        least=1,
        shown=by_preset("calib_size"),
    )
    batch_size: int = option(
        None, "sentences per training step", group=TRAINING, least=1, shown=by_preset("batch_size")
    )
    max_length: int = option(None, "tokens per sentence at most", group=MODEL, shown=by_task("max_length"))
    lr: float = option(
        None,
        "learning rate of the weights, decays linearly",
        group=TRAINING,
        shown=by_bits(),
    )
    step_lr: float = option(
        1e-3,
        "learning rate of the quantizers' scales (step sizes): their relative change per training step",
        group=TRAINING,
        rare=True,
    )
    embedding_rate: float = option(
        None,
        "learning rate of the embeddings, as a share of that of the weights",
        group=TRAINING,
        shown=by_method(),
        rare=True,
        before=1.0,
    )
    seed: int = option(
        0, "draws the calibration sentences and the order of batches", group=TRAINING, least=0, most=MOST_SEED
    )
    per_channel: bool = option(
        True, "one scale per output channel of a weight instead of one per weight", group=BITS
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
    hot_rows: str = option(
        AUTO,
        "rows of the word embedding that keep 8 bits: those whose error the calibration sentences meet most. "
        "auto: 64 at 2 and 4 bits",
        group=BITS,
        before="0",
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
        before="never",
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
    threshold: float | None = option(
        None,
        "the threshold that your program compares scores with: the share of predictions that cross it is "
        "reported (probabilities; cosines of embeddings; scores of a regression)",
        group=MODEL, decides=False, before=None,
    )  # fmt: skip
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
        "lock-step with queues of one, first tiles of GPU kernels: two runs agree exactly, but modules wait",
        group=MREM_P,
    )
    workers: int = option(
        0, "processes; 0: one per module, at most one per GPU or CPU core",
        group=MREM_P, least=0, most=MOST_THREADS, decides=False,
    )  # fmt: skip
    max_restarts: int = option(
        3, "how often to restart all workers after one died", group=MREM_P, least=0, decides=False, rare=True
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
        "learning rate of the weights, rises over --qat-warmup and then decays linearly, in each stage; with "
        "much data use 2e-5 to 5e-5",
        group=QAT,
    )
    qat_warmup: float = option(0.1, "share of a stage in which it rises", group=QAT, rare=True, before=0.0)
    qat_relative: bool = option(
        True,
        "divide the error of hidden states and attention scores by their mean square; otherwise scores are "
        "nearly all of the first stage's loss",
        group=QAT, rare=True, before=False,
    )  # fmt: skip
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
    holdout: int = option(
        256,
        "sentences of the training split that nothing is trained on; mrem-s and mrem-p keep the state of "
        "every module that does best on them, and all methods report the loss there; they need no labels; "
        "0: none",
        group=TRAINING,
        least=0,
        rare=True,
        before=0,
    )
    output_loss: str = option(
        AUTO,
        "what the last module is trained on at the model's outputs (mrem-s, mrem-p): squared error (mse) or "
        "the divergence of the predicted probabilities (kl). auto: kl for classes, tags and answers; cosine "
        "and squared error for embeddings; squared error for scores",
        group=TRAINING,
        choices=OUTPUT_LOSSES,
        rare=True,
        before="mse",
    )
    teacher_cache: str = option(
        "auto",
        "mrem-s: auto runs the full-precision model once over the calibration sentences and keeps its hidden "
        "states in memory or, beyond --max-memory, on disk; never: it runs in every step, which is slower",
        group=MACHINE,
        choices=TEACHER_CACHES,
        rare=True,
        before="never",
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
        "them); auto: ort-cpu if the packages it needs are installed, and mrem-cpu if mrem-runtime is",
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
    threads: int = option(0, "CPU threads; 0: torch's choice", group=MACHINE, least=0, most=MOST_THREADS)
    device: str = option("auto", "auto, cpu, cuda or cuda:N", group=MACHINE)
    kernels: str = option(
        "auto",
        "what computes the quantized ops; auto: the fastest on this machine (see mrem doctor)",
        group=MACHINE,
        choices=BACKENDS,
    )

    def __post_init__(self) -> None:
        settle(self)

    @property
    def spec(self) -> QuantSpec:
        """What the layers need. With bits `auto` weights stay in full precision until bits are chosen."""
        weights, embeddings, activations = self._widths
        return QuantSpec(
            weights, embeddings, activations, self.per_channel, self.symmetric,
            self.weight_quantizer, self.curvature, self.keep_fp, hot_rows=parse_hot_rows(self.hot_rows),
        )  # fmt: skip

    @property
    def centres(self) -> bool:
        """Whether activations are shifted by the mean of each channel."""
        activations = self.spec.activation_bits
        return self.centring == "always" or (self.centring == AUTO and activations == CENTRED_BITS)

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
        gradients may differ in the last bit, and training carries that on. An option with the value that
        stands for what was done before there was the option is left out: nothing differs from then.
        """
        values = self.as_dict()
        named = [item for item in dataclasses.fields(self) if item.metadata["decides"]]
        return {
            item.name: values[item.name] for item in named if values[item.name] != item.metadata["before"]
        }

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["keep_fp"] = list(self.keep_fp)
        return values

    def to_yaml(self) -> str:
        return dump_yaml(self.as_dict())


def from_yaml(path: Path) -> dict[str, Any]:
    """The options that a recipe file sets."""
    return read_yaml(path, Recipe)


def make_recipe(values: dict[str, Any]) -> Recipe:
    """A recipe from values of YAML or the command line."""
    values = dict(values)
    if isinstance(modules := values.get("modules"), list):  # YAML: [3, 6, 9]
        texts = (item if isinstance(item, str) else shown(item) for item in modules)
        values["modules"] = ",".join(texts) + ("," if len(modules) == 1 else "")
    return Recipe(**convert_all(Recipe, values))
