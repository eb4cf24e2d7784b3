"""What is run: the paper's settings, ours, and in which words they differ.

A `Plan` is every number an experiment needs. The paper's plan is one of them, so that what a reader must be
told ("60 steps instead of 2,000") is found by comparing recipes, and never written by hand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mrem_deploy.recipe import METHODS as KNOWN_METHODS
from mrem_deploy.recipe import Recipe
from mrem_deploy.reproduce import paper

BITS = ("4-4-8", "2-2-8", "2-2-4")
METHODS = ("qat", "rem", "mrem-s", "mrem-p", "gobo")
FIRST_SEED = 0


@dataclass(frozen=True)
class Subject:
    """A fine-tuned model with its task. `fingerprint` names the weights, wherever they lie."""

    model: str
    task: str
    data: str
    layers: int
    hidden: int
    fingerprint: str = ""

    @property
    def paper_task(self) -> str:
        """The task whose table of the paper is shown beside: its own, else MNLI."""
        return self.task if self.task in paper.MAIN else "mnli"

    @property
    def paper_model(self) -> str:
        """The paper's model that is nearest in width."""
        return paper.LARGE if self.hidden >= 1024 else paper.BASE


@dataclass(frozen=True)
class Plan:
    """The defaults are the paper's for GLUE; None leaves the recipe's own default."""

    seeds: int = 10
    bits: tuple[str, ...] = BITS
    methods: tuple[str, ...] = METHODS
    steps: int = 2000
    rem_steps: int = 250  # sec:longer_rem; tab:REM_MREM says 200
    calib_size: int = 4096
    modules: int = 4
    batch_size: int = 32  # not stated by the paper
    lr: float | None = 1e-4
    max_length: int | None = None
    eval_size: int = 0
    train_size: int = 0
    qat_epochs: str = "3+3"
    qat_lr: float | None = None  # not stated by the paper
    per_channel: bool = False
    threads: int = 0
    forcing_steps: tuple[int, ...] = (250, 500, 2000, 4000)
    module_counts: tuple[int, ...] = (1, 2, 3, 4, 6)
    calib_sizes: tuple[int, ...] = (32, 64, 128, 512, 1024, 2048, 4096, 8192)

    def widths(self, papers: Sequence[str]) -> list[str]:
        """The bits of one experiment: the paper's that were asked for, or what was asked for instead."""
        return [bits for bits in papers if bits in self.bits] or list(self.bits)

    def lowest(self) -> str:
        """Where the paper shows one setting only, its hardest."""
        return self.widths(("2-2-4",))[-1]

    def does(self, method: str) -> bool:
        return method in self.methods and method in available_methods()


def paper_plan(task: str) -> Plan:
    """Section 5.1.2 of the paper."""
    plan = Plan()
    if task.startswith("squad"):
        return replace(plan, steps=4000, rem_steps=500, lr=5e-5)
    return plan


# A look that means something, in minutes for a six-layer model on two cores.
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


def make_plan(task: str, quick: bool, given: dict[str, Any]) -> Plan:
    """The plan of one subject: the paper's, one seed, our learning rate; then --quick; then what was given.

    Where --steps is given alone, the steps of REM and those of the teacher-forcing table follow it in the
    paper's proportions.
    """
    published = paper_plan(task)
    values: dict[str, Any] = {"seeds": 1, "lr": None, **(QUICK if quick else {}), **given}
    if "steps" in given:
        share = given["steps"] / published.steps
        for name in ("rem_steps", "forcing_steps"):
            if name not in given:
                values[name] = _scaled(getattr(published, name), share)
    return replace(published, **values)


def _scaled(value: Any, share: float) -> Any:
    if isinstance(value, tuple):
        return tuple(sorted({_scaled(part, share) for part in value}))
    return max(1, round(value * share))


def available_methods() -> tuple[str, ...]:
    """What the installed package can do."""
    gobo = ("gobo",) if importlib.util.find_spec("mrem_deploy.reproduce.gobo") else ()
    return (*KNOWN_METHODS, *gobo)


@dataclass(frozen=True)
class GoboRecipe(Recipe):
    """A row of comparisons that `mrem quantize` does not have: its values lie on no grid to be packed."""

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "method": "gobo"}


def name_of(recipe: Recipe) -> str:
    """The method as tables name it."""
    return "gobo" if isinstance(recipe, GoboRecipe) else recipe.method


def gobo_of(plan: Plan, subject: Subject, bits: str) -> Recipe:
    """Nothing is drawn and nothing trained, so only the evaluation is the plan's."""
    length: dict[str, Any] = {"max_length": plan.max_length} if plan.max_length else {}
    return GoboRecipe(
        model=subject.model, task=subject.task, data=subject.data, method="ptq", bits=bits,
        eval_size=plan.eval_size, threads=plan.threads, seed=FIRST_SEED, **length,
    )  # fmt: skip


def recipe_of(plan: Plan, subject: Subject, method: str, bits: str, **changes: Any) -> Recipe:
    """The recipe of one variant; the seed is set when it is run."""
    values: dict[str, Any] = {
        "model": subject.model,
        "task": subject.task,
        "data": subject.data,
        "method": method,
        "bits": bits,
        "modules": str(min(plan.modules, subject.layers)),
        "steps": plan.rem_steps if method == "rem" else plan.steps,
        "calib_size": plan.calib_size,
        "batch_size": plan.batch_size,
        "eval_size": plan.eval_size,
        "per_channel": plan.per_channel,
        "threads": plan.threads,
        "seed": FIRST_SEED,
        "export": "none",
    }
    optional: dict[str, Any] = {"lr": plan.lr, "max_length": plan.max_length}
    if method == "qat":  # it has rates of its own, and the training set instead of a calibration set
        optional = {
            "max_length": plan.max_length,
            "train_size": plan.train_size,
            "qat_epochs": plan.qat_epochs,
            "qat_lr": plan.qat_lr,
        }
    known = {item.name for item in fields(Recipe)}
    values |= {name: value for name, value in optional.items() if value is not None and name in known}
    return Recipe(**values | changes)


Recipes = Callable[[Plan, Subject], list[Recipe]]

# What a caption compares, in its words. A value of 0 means all there is.
_COMPARED = {
    "bits": "bits",
    "method": "methods",
    "steps": "steps per module",
    "modules": "modules",
    "calib_size": "calibration examples",
    "lr": "learning rate",
    "teacher_forcing": "teacher forcing",
    "per_channel": "per-channel steps",
    "eval_size": "evaluation examples",
    "train_size": "training examples of QAT",
    "qat_epochs": "epochs of QAT",
}
_ONLY_OF = {  # elsewhere the option has no effect
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
    plan: Plan, subject: Subject, recipes: Recipes, tasks: Sequence[str] = tuple(paper.MAIN)
) -> list[str]:
    """Everything in which these runs differ from the paper's, as "ours (paper: theirs)".

    tasks: those that the paper has in this experiment.
    """
    published = paper_plan(subject.task)
    geometry = {paper.BASE: (12, 768), paper.LARGE: (24, 1024)}[subject.paper_model]
    ours, theirs = recipes(plan, subject), recipes(published, replace(subject, layers=geometry[0]))
    found = []
    for name, words in _COMPARED.items():
        methods = _ONLY_OF.get(name)
        found.append((words, _values(ours, name, methods), _values(theirs, name, methods)))
    found.append(
        ("steps per product of REM", _values(ours, "steps", ("rem",)), _values(theirs, "steps", ("rem",)))
    )
    told = [
        f"{words} {_show(own)} (paper: {_show(papers)})"
        for words, own, papers in found
        if own and papers and own != papers
    ]
    if plan.seeds != published.seeds:
        told.insert(0, f"{_plural(plan.seeds, 'seed')} (paper: {published.seeds})")
    if plan.batch_size != published.batch_size:
        told.append(f"batch size {plan.batch_size} (the paper does not say; {published.batch_size} is usual)")
    if plan.qat_lr and any(recipe.method == "qat" for recipe in ours):
        told.append(f"learning rate of QAT {plan.qat_lr:g} (the paper does not say)")
    if subject.task not in tasks:
        told.append(f"task {subject.task} (paper: {subject.paper_task})")
    if (subject.layers, subject.hidden) != geometry:
        shape = f"{subject.layers} layers of width {subject.hidden}"
        told.append(f"a model of {shape} (paper: {subject.paper_model}, {geometry[0]} of {geometry[1]})")
    return told


def _values(recipes: list[Recipe], name: str, methods: tuple[str, ...] | None) -> list[Any]:
    """The different values of an option, in order of appearance."""
    chosen = (recipe for recipe in recipes if methods is None or recipe.method in methods)
    named = ((name_of(r) if name == "method" else getattr(r, name)) for r in chosen if hasattr(r, name))
    return list(dict.fromkeys(named))


def _show(values: list[Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if value == 0:
            return "all"
        return (
            f"{value:,}"
            if isinstance(value, int)
            else f"{value:g}"
            if isinstance(value, float)
            else str(value)
        )

    return ", ".join(map(one, values))


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
