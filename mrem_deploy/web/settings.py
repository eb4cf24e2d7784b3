"""site.json: what the page must know of the model. Everything in it is data; the page sets it as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mrem_deploy
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.progress import say
from mrem_deploy.models import gate
from mrem_deploy.models.sentence_files import SentenceFiles, sentence_files
from mrem_deploy.models.sentence_head import Normalize

if TYPE_CHECKING:
    from mrem_deploy.quant.frozen import FrozenModel
    from mrem_deploy.recipe import Recipe

KINDS = ("single-label", "multi-label", "score", "embedding")
HEADS = ("sequence-classification", "feature-extraction")
MOST_TEXTS, MOST_EXAMPLES = 1000, 6
USUAL_LENGTH = 128
POOLINGS = ("mean", "cls", "max", "lasttoken")  # as in page/numbers.js
PROMPTS = {"query": ("query",), "document": ("document", "passage")}  # ours: theirs
EXAMPLES = {
    "sentence": [
        ["A warm, funny film that never loses its way."],
        ["The plot makes no sense and the jokes fall flat."],
        ["It is what you would expect, no more and no less."],
    ],
    "pair": [
        ["A woman is playing the violin on a stage.", "Somebody makes music."],
        ["The shop closes at six on weekdays.", "The shop is open until midnight."],
    ],
    "embedding": [["How do I make coffee?"], ["animals that hunt at night"], ["money for a house"]],
}
SENTENCES = [
    "Grind the beans, add hot water and wait four minutes.",
    "Owls see well in the dark and catch mice.",
    "The bank offers mortgages over thirty years.",
    "The train to the coast leaves every hour.",
    "Bats find insects by the echo of their calls.",
    "A new phone costs more than a used laptop.",
    "Tea should be brewed just below the boiling point.",
    "The council approved the plan for a new bridge.",
]


def kind_of(frozen: FrozenModel) -> str:
    """How the page reads the outputs; a UserError for a model that it has no form for."""
    if frozen.head not in HEADS:
        raise UserError(
            f"the page shows classifiers and embedders, and this is a model for {frozen.head}",
            "use it with transformers.js in your own page: mrem export RESULT --profile web --out FOLDER",
        )
    if frozen.head == "feature-extraction":
        return "embedding"
    if frozen.config.num_labels == 1:
        return "score"
    multiple = getattr(frozen.config, "problem_type", None) == "multi_label_classification"
    return "multi-label" if multiple else "single-label"


def vectors_of(folder: Path) -> SentenceFiles:
    """How the embedder of a result makes its vectors; a UserError if the page cannot do the same."""
    found = sentence_files(folder)
    modes, others = found.head.pooling.modes, [part for part in found.head.after if part != Normalize()]
    if len(modes) != 1 or modes[0] not in POOLINGS or others:
        what = "has a dense layer behind its pooling" if others else f"pools by {' and '.join(modes)}"
        raise UserError(
            f"{folder} {what}; the page knows only {', '.join(POOLINGS)}",
            "use the result from Python: mrem_deploy.sentence_transformer(folder)",
        )
    return found


def reads_pairs(recipe: Recipe | None) -> bool:
    """Whether the task of the result has two sentences in every example."""
    if recipe is None or recipe.task is None:
        return False
    from mrem_deploy.data.tasks import find_task

    return recipe.text_pair_column is not None or bool(find_task(recipe.task).pair_columns)


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe of a result; None if it has none that can be read. Says so if it has changed."""
    from mrem_deploy.recipe import from_yaml, make_recipe
    from mrem_deploy.result import RECIPE
    from mrem_deploy.result.recipe_file import recipe_has_changed

    path = folder / RECIPE
    if not os.path.lexists(path):
        return None
    recipe = None
    with suppress(UserError, OSError):
        recipe = make_recipe(from_yaml(gate.inside(folder, RECIPE)))
    if recipe is None:
        say(f"{path} cannot be read: it has changed since it was written; the page does without it")
    elif recipe_has_changed(path):
        say(f"{path} has changed since it was written; the page takes the length of texts from it")
    return recipe


def read_texts(path: Path, pair: bool) -> list[list[str]]:
    """One example in each line; of a pair the second sentence follows a tab."""
    from mrem_deploy.base.strict_json import read_bytes

    shape = "give a text file with one sentence in each line" + (" and a tab between the two" if pair else "")
    try:
        lines = read_bytes(path, shape).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})", shape) from error
    rows = [[part.strip() for part in line.split("\t")] for line in lines if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != 1 + pair or not all(row):
            raise UserError(f"{path}: sentence {number} has {len(row)} parts, {1 + pair} expected", shape)
    if not rows or len(rows) > MOST_TEXTS:
        raise UserError(f"{path} has {len(rows)} sentences; 1 to {MOST_TEXTS} are expected", shape)
    return rows


def settings(
    frozen: FrozenModel,
    recipe: Recipe | None,
    title: str,
    file: str,
    file_bytes: int,
    runtime_bytes: int,
    vectors: SentenceFiles | None,
    texts: list[list[str]] | None,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """The content of site.json; `file` is the ONNX file in the site."""
    kind, pair = kind_of(frozen), reads_pairs(recipe)
    usual = EXAMPLES["embedding" if kind == "embedding" else "pair" if pair else "sentence"]
    examples, sentences = texts or usual, list[str]()
    if kind == "embedding":
        examples, sentences = ([], [row[0] for row in texts]) if texts else (usual, SENTENCES)
    return {
        "made_by": f"mrem_deploy {mrem_deploy.__version__}",
        "title": title,
        "kind": kind,
        "pair": pair,
        "labels": labels_of(frozen) if kind != "embedding" else [],
        "bits": str(frozen.notes.get("bits") or "few"),
        "max_length": (vectors.max_seq_length if vectors else None) or longest(frozen, recipe),
        "pooling": vectors.head.pooling.modes[0] if vectors else "",
        "prompts": {name: vectors.prompt(*names) for name, names in PROMPTS.items()} if vectors else {},
        "file": file,
        "file_bytes": file_bytes,
        "runtime_bytes": runtime_bytes,
        "full_precision_mib": round(frozen.full_precision_mb(), 3),
        "result_digest": frozen.digest,
        "libraries": dict(versions),
        "examples": examples[:MOST_EXAMPLES],
        "sentences": sentences,
    }


def longest(frozen: FrozenModel, recipe: Recipe | None) -> int:
    """The tokens that the page reads at most: those of the run, where that is known."""
    if recipe is not None and recipe.max_length is not None:
        return recipe.max_length
    positions = getattr(frozen.config, "max_position_embeddings", USUAL_LENGTH)
    return max(1, min(USUAL_LENGTH, positions - 2))  # the RoBERTa family has two positions that no token gets


def labels_of(frozen: FrozenModel) -> list[str]:
    """The names of the classes, in the order of the outputs."""
    names = {int(number): str(name) for number, name in (frozen.config.id2label or {}).items()}
    return [names.get(number, f"LABEL_{number}") for number in range(frozen.config.num_labels)]
