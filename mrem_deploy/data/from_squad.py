"""`mrem beir SQUAD --out DIR`: a retrieval set in BEIR's layout, made from SQuAD.

Every question of the dev set is a query, and its paragraph is what it should find among all paragraphs of
the dev set. train.jsonl has questions of the training set, each with its paragraph (label 1) and with
others near it in the file (label 0), most of them of the same article: pairs to train a reranker with, and
texts to calibrate with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder
from mrem_deploy.base.options import MOST_SEED, whole
from mrem_deploy.base.outside import path_of
from mrem_deploy.base.progress import say
from mrem_deploy.data.beir import COLUMNS, CORPUS, QRELS, QUERIES
from mrem_deploy.data.squad_files import read_official

FILES = {"train": "train-v1.1.json", "dev": "dev-v1.1.json"}
PAIRS = "train.jsonl"
NEAR = 10  # paragraphs before and after one; an article has about 43
EXAMPLES = """\
examples:
  mrem beir squad --out squad-beir
  mrem beir squad --out squad-beir --train-questions 50000 --negatives 3
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrem beir",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="SQUAD", help=f"folder with {FILES['train']} and {FILES['dev']}")
    parser.add_argument("--out", required=True, metavar="DIR", help="new or empty folder to write")
    parser.add_argument(
        "--train-questions",
        type=whole("--train-questions", 0),
        default=20_000,
        help="questions of the training set in train.jsonl, drawn at random; 0: all (default 20000)",
    )
    parser.add_argument(
        "--negatives",
        type=whole("--negatives", 0, 100),
        default=1,
        help="paragraphs that do not answer, for every question in train.jsonl (default 1)",
    )
    parser.add_argument(
        "--seed", type=whole("--seed", 0, MOST_SEED), default=0, help="of what is drawn (default 0)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    source, out = path_of("SQUAD", options.folder), path_of("--out", options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is not an empty folder", "give a new one; nothing was touched")
    if source.resolve().is_relative_to(out.resolve()):
        raise UserError(f"--out {out} holds the source", "give another folder")
    dev, train = (_rows(source / FILES[split]) for split in ("dev", "train"))
    corpus = _ids(dev["context"])
    pairs = list(_pairs(train, options.train_questions, options.negatives, options.seed))
    with atomic_folder(out) as folder:
        _write(folder / CORPUS, ({"_id": name, "title": "", "text": text} for text, name in corpus.items()))
        queries = zip(dev["id"], dev["question"], strict=True)
        _write(folder / QUERIES, ({"_id": name, "text": text} for name, text in queries))
        lines = ["\t".join(COLUMNS)]
        judged = zip(dev["id"], dev["context"], strict=True)
        lines += [f"{name}\t{corpus[context]}\t1" for name, context in judged]
        (folder / QRELS).mkdir()
        (folder / QRELS / "test.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        _write(folder / PAIRS, pairs)
    say(
        f"wrote {out}: {len(dev['id']):,} queries, {len(corpus):,} paragraphs, {len(pairs):,} pairs to train "
        "with"
    )
    return 0


def _rows(path: Path) -> Mapping[str, list[Any]]:
    if not path.is_file():
        raise UserError(f"there is no {path}", "give the folder with SQuAD's official files")
    try:
        rows = read_official(path, unanswerable=False)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no JSON, another layout
        raise UserError(f"{path} cannot be read: {error}", "download the file again") from error
    if rows is None:
        raise UserError(f"{path} is not in SQuAD's layout", "give the official file")
    # A few questions of the training set are only spaces: nothing can be searched for with them.
    kept = [i for i, question in enumerate(rows["question"]) if question.strip()]
    return {name: [cells[i] for i in kept] for name, cells in rows.items()}


def _ids(contexts: Sequence[str]) -> dict[str, str]:
    """Every paragraph once, with a name."""
    return {text: f"p{place}" for place, text in enumerate(dict.fromkeys(contexts))}


def _pairs(rows: Mapping[str, list[Any]], count: int, negatives: int, seed: int) -> Iterator[dict[str, Any]]:
    """Questions with their paragraph, and with others near it, most of them of its article."""
    paragraphs = list(dict.fromkeys(rows["context"]))
    place = {text: i for i, text in enumerate(paragraphs)}
    draw = np.random.default_rng(seed)
    total = len(rows["question"])
    chosen = draw.choice(total, size=min(count, total) if count else total, replace=False)
    for i in np.sort(chosen):
        question, own = rows["question"][i], place[rows["context"][i]]
        yield {"query": question, "passage": paragraphs[own], "label": 1}
        near = [j for j in range(own - NEAR, own + NEAR + 1) if j != own and 0 <= j < len(paragraphs)]
        for j in draw.choice(near, size=min(negatives, len(near)), replace=False) if near else ():
            yield {"query": question, "passage": paragraphs[j], "label": 0}


def _write(path: Path, rows: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
