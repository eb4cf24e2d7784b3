"""The settings of the experiments: the paper's, ours, and in what they differ.

An `ExperimentPlan` holds every number an experiment needs. The paper's settings are a plan too, so captions
such as "60 steps (paper: 2,000)" come from comparing recipes and are never written by hand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mrem_deploy.recipe import METHODS as KNOWN_METHODS
from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce import paper

BITS = ("4-4-8", "2-2-8", "2-2-4")
METHODS = ("qat", "rem", "mrem-s", "mrem-p", "gobo")
FIRST_SEED = 0


@dataclass(frozen=True)
class Subject:
    """A fine-tuned model with its task. `fingerprint` names the weights, wherever they are stored."""

    model: str
    task: str
    data: str
    layers: int
    hidden: int
    fingerprint: str = ""

    @property
    def paper_task(self) -> str:
        """The task whose table of the paper is shown next to ours: the same one, else MNLI."""
        return self.task if self.task in paper.MAIN else "mnli"

    @property
    def paper_model(self) -> str:
        """The paper's model with the closest width."""
        return paper.LARGE if self.hidden >= 1024 else paper.BASE


@dataclass(frozen=True)
class ExperimentPlan:
    """Every number of the experiments. Defaults are the paper's for GLUE; None takes the recipe's."""

    seeds: int = 10
    bits: tuple[str, ...] = BITS
    methods: tuple[str, ...] = METHODS
    steps: int = 2000
    rem_steps: int = 250  # sec:longer_rem; tab:REM_MREM says 200
    calib_size: int = 4096
    modules: int = 4
    batch_size: int = 32  # the paper does not say
    lr: float | None = 1e-4
    max_length: int | None = None
    eval_size: int = 0
    train_size: int = 0
    qat_epochs: str = "3+3"
    qat_lr: float | None = None  # the paper does not say
    per_channel: bool = False
    threads: int = 0
    forcing_steps: tuple[int, ...] = (250, 500, 2000, 4000)
    module_counts: tuple[int, ...] = (1, 2, 3, 4, 6)
    calib_sizes: tuple[int, ...] = (32, 64, 128, 512, 1024, 2048, 4096, 8192)

    def widths(self, papers: Sequence[str]) -> list[str]:
        """The bits of one experiment: those of the paper's that --bits names, else all that --bits names."""
        return [bits for bits in papers if bits in self.bits] or list(self.bits)

    def lowest(self) -> str:
        """For experiments that the paper shows at one setting only, its hardest."""
        return self.widths(("2-2-4",))[-1]

    def does(self, method: str) -> bool:
        return method in self.methods and method in available_methods()


def paper_plan(task: str) -> ExperimentPlan:
    """Section 5.1.2 of the paper."""
    plan = ExperimentPlan()
    if task.startswith("squad"):
        return replace(plan, steps=4000, rem_steps=500, lr=5e-5)
    return plan


# `--quick`: numbers that still mean something, in minutes for a six-layer model on two cores.
QUICK: dict[str, Any] = {
    "bits": ("2-2-8", "2-2-4"),
    "steps": 60,
    "rem_steps": 20,
    "calib_size": 512,
    "batch_size": 16,
    "lr": 1e-3,
    "eval_size": 500,
    "train_size": 768,
    "qat_epochs": "1+1",
    "forcing_steps": (20, 60),
    "module_counts": (1, 2, 4),
    "calib_sizes": (32, 512),
}


def make_plan(task: str, quick: bool, given: Mapping[str, Any]) -> ExperimentPlan:
    """The plan of one subject: the paper's with one seed and our learning rate, then --quick, then `given`.

    given: options of the command line, by field. If --steps is among them, the steps of REM and those of the
    teacher-forcing table follow it in the paper's proportions, unless they are given too.
    """
    published = paper_plan(task)
    plan = replace(published, seeds=1, lr=None)
    if quick:
        plan = replace(plan, **QUICK)
    if "steps" in given:
        share = given["steps"] / published.steps
        forcing = {_scaled(steps, share) for steps in published.forcing_steps}
        plan = replace(
            plan, rem_steps=_scaled(published.rem_steps, share), forcing_steps=tuple(sorted(forcing))
        )
    return replace(plan, **given)


def _scaled(steps: int, share: float) -> int:
    return max(1, round(steps * share))


def available_methods() -> tuple[str, ...]:
    """The methods of this installation."""
    gobo = ("gobo",) if importlib.util.find_spec("mrem_deploy.reproduce.gobo") else ()
    return (*KNOWN_METHODS, *gobo)


@dataclass(frozen=True)
class GoboRecipe(Recipe):
    """GOBO, which `mrem quantize` does not have: its values are on no grid, so they cannot be packed."""

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "method": "gobo"}


def name_of(recipe: Recipe) -> str:
    """The name of the method in tables."""
    return "gobo" if isinstance(recipe, GoboRecipe) else recipe.method


def gobo_of(plan: ExperimentPlan, subject: Subject, bits: str) -> Recipe:
    """GOBO samples and trains nothing, so only the evaluation follows the plan."""
    return GoboRecipe(
        model=subject.model, task=subject.task, data=subject.data, method="ptq", bits=bits,
        eval_size=plan.eval_size, threads=plan.threads, seed=FIRST_SEED, **_known(max_length=plan.max_length),
    )  # fmt: skip


def papers_settings(bits: str) -> dict[str, Any]:
    """The paper's own quantizers and losses, where the defaults of `mrem quantize` have become others."""
    two_bits = "2" in bits.split("-")[:2]
    return {
        "weight_quantizer": "twn" if two_bits else "auto",
        "hot_rows": "0",
        "embedding_rate": 1.0,
        "output_loss": "mse",
        "centring": "never",
    }


def recipe_of(plan: ExperimentPlan, subject: Subject, method: str, bits: str, **changes: Any) -> Recipe:
    """The recipe of one variant; the seed is set when it is run."""
    options = _known(max_length=plan.max_length, lr=plan.lr)
    if method == "qat":  # it has separate rates, and the training set instead of a calibration set
        options = _known(
            max_length=plan.max_length,
            train_size=plan.train_size,
            qat_epochs=plan.qat_epochs,
            qat_lr=plan.qat_lr,
        )
    recipe = Recipe(
        model=subject.model,
        task=subject.task,
        data=subject.data,
        method=method,
        bits=bits,
        modules=str(min(plan.modules, subject.layers)),
        steps=plan.rem_steps if method == "rem" else plan.steps,
        calib_size=plan.calib_size,
        batch_size=plan.batch_size,
        eval_size=plan.eval_size,
        per_channel=plan.per_channel,
        threads=plan.threads,
        seed=FIRST_SEED,
        export="none",
        **papers_settings(bits),
        **options,
    )
    return replace(recipe, **changes)


def _known(**options: Any) -> dict[str, Any]:
    """Options whose value is None are left to the recipe's defaults."""
    return {name: value for name, value in options.items() if value is not None}


Recipes = Callable[[ExperimentPlan, Subject], list[Recipe]]

# What a caption compares, in words. A value of 0 means all examples.
_COMPARED = {
    "bits": "bits",
    "method": "methods",
    "steps": "steps per module",
    "modules": "modules",
    "calib_size": "calibration examples",
    "lr": "learning rate",
    "teacher_forcing": "teacher forcing",
    "per_channel": "per-channel scales",
    "eval_size": "evaluation examples",
    "train_size": "training examples of QAT",
    "qat_epochs": "epochs of QAT",
}
_ONLY_OF = {  # other methods ignore the option
    "train_size": ("qat",),
    "qat_epochs": ("qat",),
    "per_channel": ("qat", "rem", "mrem-s", "mrem-p"),
    "modules": ("mrem-s", "mrem-p"),
    "lr": ("rem", "mrem-s", "mrem-p"),
    "calib_size": ("rem", "mrem-s", "mrem-p"),
    "teacher_forcing": ("mrem-p",),
    "steps": ("mrem-s", "mrem-p"),
}


def differences(
    plan: ExperimentPlan, subject: Subject, recipes: Recipes, tasks: Sequence[str] = tuple(paper.MAIN)
) -> list[str]:
    """Every setting in which these runs differ from the paper's, as "ours (paper: theirs)".

    tasks: those on which the paper shows this experiment.
    """
    published = paper_plan(subject.task)
    geometry = {paper.BASE: (12, 768), paper.LARGE: (24, 1024)}[subject.paper_model]
    ours, theirs = recipes(plan, subject), recipes(published, replace(subject, layers=geometry[0]))
    found = []
    for name, words in _COMPARED.items():
        methods = _ONLY_OF.get(name)
        found.append((words, _values(ours, name, methods), _values(theirs, name, methods)))
    found.append(
        ("steps per matmul of REM", _values(ours, "steps", ("rem",)), _values(theirs, "steps", ("rem",)))
    )
    unlike = [
        f"{words} {_show(own)} (paper: {_show(papers)})"
        for words, own, papers in found
        if own and papers and own != papers
    ]
    if plan.seeds != published.seeds:
        unlike.insert(0, f"{_plural(plan.seeds, 'seed')} (paper: {published.seeds})")
    if plan.batch_size != published.batch_size:
        usual = f"the paper does not say; {published.batch_size} is usual"
        unlike.append(f"batch size {plan.batch_size} ({usual})")
    if plan.qat_lr and any(recipe.method == "qat" for recipe in ours):
        unlike.append(f"learning rate of QAT {plan.qat_lr:g} (the paper does not say)")
    if subject.task not in tasks:
        unlike.append(f"task {subject.task} (paper: {subject.paper_task})")
    if (subject.layers, subject.hidden) != geometry:
        shape = f"{subject.layers} layers of width {subject.hidden}"
        unlike.append(f"a model of {shape} (paper: {subject.paper_model}, {geometry[0]} of {geometry[1]})")
    return unlike


def _values(recipes: Sequence[Recipe], name: str, methods: tuple[str, ...] | None) -> list[object]:
    """The different values of an option, in order of appearance."""
    chosen = (recipe for recipe in recipes if methods is None or recipe.method in methods)
    named = (name_of(recipe) if name == "method" else getattr(recipe, name) for recipe in chosen)
    return list(dict.fromkeys(named))


def _show(values: Sequence[object]) -> str:
    def one(value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if value == 0:
            return "all"
        if isinstance(value, int):
            return f"{value:,}"
        return f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(map(one, values))


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
