"""`mrem quantize`: quantize a fine-tuned encoder, measure it and export it to ONNX."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from mrem_deploy.base import cli

EXAMPLES = """\
examples:
  mrem quantize
      the built-in example: a small encoder, fine-tuned on movie reviews, to 4 and to 2 bits (minutes)
  mrem quantize --model my-bert-sst2 --task sst2 --data glue/SST-2 --out result
  mrem quantize --model my-bert --task text-classification --data reviews.csv \\
      --text-column review --label-column stars --bits 2-2-8 --time-budget 10m --out result
      as many steps as fit into ten minutes on this machine
  mrem quantize --model my-embedder --task feature-extraction --data sentences.txt --out result
  mrem quantize --model my-bert --task mnli --data glue/MNLI --method mrem-p --modules 4 --out result
      trains all modules at once, each in a separate process
  mrem quantize --model my-bert --task mnli --data glue/MNLI --bits auto --budget-mb 40 --out result
      chooses 2, 4 or 8 bits for each layer by its sensitivity, within 40 MiB
  mrem quantize --model my-bert --task mnli --data glue/MNLI --bits auto --target-drop 1.0 --out result
      the smallest model that loses at most one point, estimated on the training split
  mrem quantize --config result/recipe.yaml --out again      (the same run once more)
  mrem quantize --model my-bert --task sst2 --data glue/SST-2 --out result
      (after an interruption, the same command continues from the last checkpoint; --fresh starts over)

`mrem quantize` is the same as `python -m mrem_deploy.quantize`. All options: docs/recipe.md
"""


def build_parser() -> argparse.ArgumentParser:
    from mrem_deploy.base.options import add_options, add_resuming
    from mrem_deploy.recipe import Recipe
    from mrem_deploy.recipe_groups import GROUPS

    parser = argparse.ArgumentParser(
        prog="mrem quantize",
        usage="mrem quantize [--model MODEL --task TASK --data DATA --out OUT] [options]",
        description="Quantize a fine-tuned BERT-type model to few bits, measure it and export it to ONNX.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="YAML",
        help="recipe file to start from; options given here override it",
    )
    add_resuming(parser)
    parser.add_argument(
        "--plan", action="store_true", help="only show what would be done, and its time, memory and disk"
    )
    add_options(parser, Recipe, GROUPS)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = vars(build_parser().parse_args(argv))
    config, resume, fresh = (arguments.pop(name) for name in ("config", "resume", "fresh"))
    only_plan = arguments.pop("plan")

    from mrem_deploy import pipeline
    from mrem_deploy.recipe import from_yaml, make_recipe
    from mrem_deploy.report.summary import terminal_summary

    values: dict[str, Any] = from_yaml(Path(config)) if config else {}
    values.update(arguments)
    runs = [values]
    if not {"model", "task", "data"} & values.keys():
        from mrem_deploy.demo import demo_runs

        runs = demo_runs(values)
    for recipe in map(make_recipe, runs):
        if only_plan:
            print("\n".join(pipeline.plan(recipe).lines()))
            continue
        result = pipeline.run(recipe, resume, fresh)
        if os.environ.get("RANK", "0") == "0":  # only the first of several workers prints
            print(terminal_summary(result.metrics, result.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, resumes=True))
