"""Where the rows come from: files, folders and hub ids, all turned into plain columns.

Nothing here knows what a label means. Note: tab-separated files are split at tabs and nothing else. A quote
in GLUE is a character of the sentence; a parser that interprets quotes loses thousands of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.data.table_files import (
    FIRST_ROW,
    SUFFIXES,
    Naming,
    Table,
    Wanted,
    _not_empty,
    listing,
    read_files,
    squeeze,
)

GLUE_ON_HUB = "nyu-mll/glue"
TRAIN_SHARE = 0.8  # of a single file; the rest is for evaluation
SPLIT_SEED = 0  # fixed, so that the evaluation rows do not move with --seed
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")  # owner/name:config


Part = Callable[[Wanted], Table]  # reads a split


class Source:
    """The splits of a task, each read when it is needed.

    `holdout` names an evaluation split made of a fixed random fifth of the training rows, which are
    then not trained on.
    """

    def __init__(
        self, description: str, train: Part | None, evaluation: dict[str, Part], holdout: str
    ) -> None:
        self.description = description + (" (a fixed random fifth kept for evaluation)" if holdout else "")
        self._train = train
        self._evaluation = evaluation
        self._holdout = holdout

    def train(self, wanted: Wanted) -> Table:
        assert self._train is not None, "opened for evaluation only"
        table = self._train(wanted)
        return _shares(table)[0] if self._holdout else table

    def evaluation(self, wanted: Wanted) -> dict[str, Table]:
        if self._holdout and self._train:
            return {self._holdout: _shares(self._train(wanted))[1]}
        return {split: part(wanted) for split, part in self._evaluation.items()}

    def first_rows(self, of_evaluation: bool) -> list[Table]:
        """One row of each split: enough to find a missing column before hours of training."""
        if of_evaluation and not self._holdout:
            return [part(FIRST_ROW) for part in self._evaluation.values()]
        assert self._train is not None, "opened for evaluation only"
        return [self._train(FIRST_ROW)]


def open_source(data: str, naming: Naming, role: str = "both") -> Source:
    """Open `data`: a file, a folder, a folder of GLUE folders, or a hub id.

    `role`: "both", or "train" or "evaluation" if the other split is somewhere else.
    """
    path = path_of("--eval-data" if role == "evaluation" else "--data", data)
    if path.is_dir():
        return _open_folder(path, naming, role)
    if path.exists() and not path.is_file():
        raise UserError(
            f"Expected a file or folder at {data}; it is a device, pipe or socket.",
            "Files are read several times: copy the data into an ordinary file.",
        )
    if path.exists():
        part = partial(read_files, [path], naming)
        if role == "evaluation":
            return Source(data, None, {_split_of(path, naming): part}, holdout="")
        return Source(data, part, {}, holdout=naming.eval_splits[0] if role == "both" else "")
    if not _HUB_ID.fullmatch(data) or path.suffix in SUFFIXES:
        raise UserError(
            f"Expected data at {data}, but there is no such file or folder.",
            "Check the path; a file, a folder or a hub id such as nyu-mll/glue can be given.",
        )
    return _open_hub(data, naming, role)


def _open_folder(folder: Path, naming: Naming, role: str) -> Source:
    names = {
        name for layout in naming.layouts for name in (layout.train, *chain(*layout.evaluation.values()))
    }
    try:
        entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        for inner in entries:
            if naming.folder and squeeze(inner.name) == squeeze(naming.folder) and inner.is_dir():
                return _open_folder(inner, naming, role)
        files = {name: found for name in names if (found := files_of(folder, name, naming.suffixes))}
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be read: {error.strerror or error}.", "Check its permissions."
        ) from error
    parts: dict[str, Part] = {name: partial(read_files, found, naming) for name, found in files.items()}
    return _arrange(str(folder), parts, [path.name for path in entries], naming, role)


def _open_hub(hub_id: str, naming: Naming, role: str) -> Source:
    """A dataset of the Hugging Face hub, memory-mapped; `owner/name:config` chooses a configuration."""
    name, _, config = hub_id.partition(":")
    if name in ("glue", GLUE_ON_HUB):
        name, config = GLUE_ON_HUB, config or squeeze(naming.folder)
    splits = _load_from_hub(name, config or None)
    place = f"{name}:{config}" if config else name
    parts: dict[str, Part] = {
        split: partial(_hub_table, splits[split], f"{place}, {split}") for split in splits
    }
    return _arrange(place, parts, list(splits), naming, role)


def _arrange(place: str, parts: dict[str, Part], present: list[str], naming: Naming, role: str) -> Source:
    """The first layout that has everything that `role` needs."""
    for layout in naming.layouts:
        train = layout.train if layout.train in parts and role != "evaluation" else ""
        found = {
            split: next((name for name in choices if name in parts), "")
            for split, choices in layout.evaluation.items()
            if role != "train"
        }
        evaluation = {split: name for split, name in found.items() if name}
        holdout = role == "both" and not naming.folder and not evaluation  # never invent a split of GLUE
        if (train or role == "evaluation") and (evaluation or holdout or role == "train"):
            return Source(
                f"{place}: {', '.join(filter(None, [train, *evaluation.values()]))}",
                parts[train] if train else None,
                {split: parts[name] for split, name in evaluation.items()},
                holdout=naming.eval_splits[0] if holdout else "",
            )
    wanted = [
        " and ".join(
            ([layout.train] if role != "evaluation" else [])
            + ([" or ".join(choices) for choices in layout.evaluation.values()] if role != "train" else [])
        )
        for layout in naming.layouts
    ]
    raise UserError(
        f"Expected {'; or '.join(wanted)} in {place}; it holds {listing(present)}.",
        f"Files may end in {', '.join(SUFFIXES)}. Give the folder that holds them, or a single file.",
    )


def _hub_table(rows: Any, origin: str, wanted: Wanted) -> Table:
    from datasets import ClassLabel

    rows = rows.select(range(min(wanted.rows or len(rows), len(rows))))
    columns: dict[str, list[Any]] = {name: list(rows[name]) for name in rows.features if name in wanted}
    classes = {
        name: tuple(kind.names)
        for name, column in rows.features.items()
        if isinstance(kind := getattr(column, "feature", column), ClassLabel)  # a list of them, or one
    }

    def named(cell: Any, names: tuple[str, ...]) -> Any:
        if isinstance(cell, list):
            return [named(item, names) for item in cell]
        return None if cell is None or cell < 0 else names[cell]

    for name in set(classes) & set(columns):  # names instead of numbers; a negative number means "no label"
        columns[name] = [named(cell, classes[name]) for cell in columns[name]]
    return _not_empty(Table(columns, origin, classes))


def files_of(folder: Path, stem: str, more_suffixes: tuple[str, ...] = ()) -> list[Path]:
    """train.tsv, train.jsonl, …, or the shards train-00000-of-00002.parquet of a copy of a hub dataset."""
    for suffix in (*SUFFIXES, *more_suffixes):
        if (folder / f"{stem}{suffix}").is_file():
            return [folder / f"{stem}{suffix}"]
    return sorted(folder.glob(f"{stem}-[0-9]*-of-[0-9]*.parquet"))


def _load_from_hub(name: str, config: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config)
    # Whatever the network, the hub or a cache raises, the user can do the same; the cause is chained.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"Expected data at {name}{f' ({config})' if config else ''}: there is no such file or folder, "
            f"and it could not be loaded from the Hugging Face hub ({reason}).",
            "Check the spelling and the network; or fetch the data on another machine and give its folder, "
            "e.g. --data glue/SST-2 with train.tsv and dev.tsv inside (jsonl, csv and parquet work too).",
        ) from error


def _shares(table: Table) -> tuple[Table, Table]:
    """The fixed split of a single file: 80 % to train, 20 % to evaluate."""
    count = len(table)
    if count < 2:
        raise UserError(
            f"Expected at least 2 rows in {table.origin} to split it; it has {count}.",
            "Give a folder with train.* and dev.*, or name the evaluation file with --eval-data.",
        )
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    cut = min(count - 1, max(1, round(TRAIN_SHARE * count)))
    return table.take(np.sort(order[:cut])), table.take(np.sort(order[cut:]))


def _split_of(path: Path, naming: Naming) -> str:
    """The split of a file, if its name says it, like dev_mismatched.tsv; else the first one."""
    splits = (item for layout in naming.layouts for item in layout.evaluation.items())
    return next((split for split, choices in splits if path.stem in choices), naming.eval_splits[0])
