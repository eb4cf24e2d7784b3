"""`mrem finetune`: an encoder and labelled data in, a full-precision model out."""

from __future__ import annotations

import argparse

from mrem_deploy.base import cli
from mrem_deploy.base.options import add_resuming
from mrem_deploy.recipe_defaults import by_task

EXAMPLES = """\
examples:
  python -m mrem_deploy.finetune --model bert-base-uncased --task sst2 --data glue/SST-2 --out bert-sst2
  python -m mrem_deploy.finetune --model my-encoder --task squad --data squad --epochs 2 --out my-reader
  python -m mrem_deploy.finetune --model my-encoder --task token-classification --data conll --out my-tagger
  python -m mrem_deploy.finetune --model my-encoder --task reranking --data squad-beir --out my-reranker
  python -m mrem_deploy.finetune --model my-encoder --task text-classification --data reviews.csv \\
      --text-column review --label-column stars --epochs 2 --out my-classifier
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrem finetune",
        description="Fine-tune an encoder in full precision. Writes time, memory and score next to it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or hub id of the encoder; a new head is added where needed")
    add(
        "--task",
        required=True,
        help="a GLUE task, squad, squad_v2, text- or token-classification, or reranking",
    )
    add("--data", required=True, help="folder, file or hub id of the task's data")
    add("--out", required=True, help="folder for the fine-tuned model; written as a whole at the end")
    add("--eval-data", help="evaluation file, if it is not next to the training file")
    add("--text-column", help="column of the sentence, for a file of your own")
    add("--text-pair-column", help="column of the second sentence")
    add("--label-column", help="column of the label")
    add("--epochs", type=float, help="passes over the training data, also a fraction (3)")
    add("--batch-size", type=int, help="sentences per step (32)")
    add("--lr", type=float, help="highest learning rate; decays linearly to 0 (5e-5)")
    add("--warmup", type=float, help="share of the steps over which the learning rate rises (0)")
    add("--max-length", type=int, help=f"tokens per sentence at most ({by_task('max_length')})")
    add("--seed", type=int, help="for the new head, the order of batches and dropout (0)")
    add("--checkpoint-steps", type=int, help="steps between checkpoints, 0 for none (500)")
    add("--eval-size", type=int, help="evaluate on that many examples only, drawn by --seed (all)")
    add("--device", help="auto, cpu, cuda or cuda:N (auto)")
    add("--overwrite", action="store_true", help="replace --out even if it holds other files")
    add_resuming(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = vars(build_parser().parse_args(argv))
    how = {name: arguments.pop(name, False) for name in ("resume", "fresh", "overwrite")}

    from mrem_deploy.finetuning import FinetuneSettings, finetune

    finetune(FinetuneSettings(**arguments), **how)
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, resumes=True))
