"""`python -m mrem_deploy.reproduce WHAT …`: the paper's tables and figures for your model, and an ablation.

Only light modules are imported before the arguments are parsed, so `--help` loads no torch.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrem_deploy.base import cli, interrupt
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import path_of
from mrem_deploy.benchmarks import options as opt
from mrem_deploy.reproduce.experiments import EXPERIMENTS, PAPERS
from mrem_deploy.reproduce.paper import PAPER_MODELS
from mrem_deploy.reproduce.plan import METHODS, ExperimentPlan

if TYPE_CHECKING:
    from mrem_deploy.reproduce.page import Entry

ALL = "all"
PLAN_FIELDS = {field.name for field in fields(ExperimentPlan)}
EXAMPLES = """\
examples:
  python -m mrem_deploy.reproduce main --model my-bert --task mnli --data glue/MNLI --out reproduced --quick
      QAT, REM, MREM-S and MREM-P next to the paper's table, in minutes
  python -m mrem_deploy.reproduce all --model my-bert --task mnli --data glue/MNLI --out reproduced --dry-run
      lists every run of every experiment, and how long each would take
  python -m mrem_deploy.reproduce num-modules calib-size --model M --task sst2 --data SST-2 --seeds 3 \\
      --steps 500 --out reproduced
  python -m mrem_deploy.reproduce glue --task rte --data glue/RTE --model my-rte \\
      --task mrpc --data glue/MRPC --encoder bert-base-uncased --out reproduced
      a model for RTE is given; the one for MRPC is fine-tuned from the encoder
  python -m mrem_deploy.reproduce ablation --model my-bert --task mnli --data glue/MNLI --bits 2-2-8 \\
      --seeds 3 --out ablation
      what each part of the default recipe gives, over three calibration sets

The same command again runs only what is missing: after Ctrl-C it continues where it stopped.
"""


class Triple(argparse.Action):
    """--model, --task and --data belong together; one that comes a second time starts the next triple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        triples = getattr(namespace, "triples", None) or [{}]
        name = str(option).removeprefix("--")
        if name in triples[-1]:
            triples.append({})
        triples[-1][name] = values
        namespace.triples = triples


def build_parser() -> argparse.ArgumentParser:
    whats = "\n".join(
        f"  {name:<18}{e.title} ({e.source or 'not in the paper'})" for name, e in EXPERIMENTS.items()
    )
    parser = argparse.ArgumentParser(
        prog="mrem reproduce",
        description="Run the paper's experiments on your model. WHAT is one or more of\n"
        f"{whats}\n  {ALL:<18}all that are in the paper, on one page",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="+", metavar="WHAT", help="experiments, see above")
    for name, help in (
        ("model", "folder or hub id of a fine-tuned model"),
        ("task", "its task; to use several tasks, repeat --model, --task and --data"),
        ("data", "folder, file or hub id of the task's data"),
    ):
        add(f"--{name}", action=Triple, metavar=name.upper(), help=help)
    add("--out", required=True, metavar="DIR", help="folder for tables, plots and finished runs")
    add("--quick", action="store_true", help="a small run; options that you give take precedence")
    add("--dry-run", action="store_true", help="list the runs and how long they would take; run nothing")
    add("--keep-models", action="store_true", help="keep the quantized weights of every run")

    def plan_option(flag: str, read: Any, help: str) -> None:
        add(flag, type=read, default=argparse.SUPPRESS, metavar=flag[2:].upper(), help=help)

    def whole(flag: str, least: int, help: str) -> None:
        plan_option(flag, opt.whole(flag, least), help)

    def several(flag: str, least: int, example: str, help: str) -> None:
        plan_option(flag, opt.several(opt.whole(flag, least), flag, example), help)

    whole("--seeds", 1, "repetitions of every run, each with another calibration set (1; the paper has 10)")
    plan_option(
        "--bits", opt.several(opt.bits, "--bits", "2-2-8,2-2-4"), "only these W-E-A (4-4-8,2-2-8,2-2-4)"
    )
    plan_option(
        "--methods",
        opt.several(_method, "--methods", "rem,mrem-s"),
        "only these methods (all that are installed)",
    )
    whole("--steps", 1, "training steps per module (2000; SQuAD 4000; ablation 400)")
    whole("--rem-steps", 1, "training steps per matmul of REM (an eighth of --steps, as in the paper)")
    several(
        "--forcing-steps",
        1,
        "250,2000",
        "steps in teacher-forcing (an eighth of --steps, a quarter, all, twice as many)",
    )
    several("--module-counts", 1, "1,2,4", "numbers of modules in num-modules (1,2,3,4,6)")
    several("--calib-sizes", 1, "32,512", "sizes in calib-size (32 … 8192)")
    whole("--calib-size", 1, "calibration examples everywhere else (4096)")
    whole("--modules", 1, "modules everywhere except in num-modules (4)")
    whole("--batch-size", 1, "examples per step (32; ablation 16)")
    whole("--max-length", 3, "most tokens per example (128; SQuAD 384)")
    plan_option("--lr", _rate("--lr"), "learning rate of REM and MREM (the default of mrem quantize)")
    whole("--eval-size", 1, "evaluate on this many random examples (all)")
    whole("--train-size", 1, "training examples of QAT (all)")
    plan_option("--qat-epochs", str, "epochs of both stages of QAT (3+3)")
    plan_option("--qat-lr", _rate("--qat-lr"), "learning rate of QAT (the default of mrem quantize)")
    add("--per-channel", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
        help="one weight scale per output channel; per-channel and ablation have both")  # fmt: skip
    plan_option("--threads", opt.whole("--threads", 0, opt.MOST_THREADS), "CPU threads; 0: torch chooses")
    add("--geometry", type=opt.several(_geometry, "--geometry", "bert-base,bert-large"), default=(),
        help="main and overview: also time and memory of bert-base or bert-large (or both), measured over a "
        "few steps with random weights and extrapolated")  # fmt: skip
    add(
        "--geometry-steps",
        type=opt.whole("--geometry-steps", 2),
        default=2,
        help="measured steps (default 2)",
    )
    add(
        "--geometry-batch",
        type=opt.whole("--geometry-batch", 1),
        help="examples per measured step (default: --batch-size); memory is that of this batch, time is "
        "scaled to the paper's",
    )
    add("--encoder", metavar="MODEL", help="fine-tune from this model for every task without --model")
    add("--finetune-epochs", type=float, default=3.0, help="epochs of that fine-tuning (default 3)")
    return parser


def _method(text: str) -> str:
    if text not in METHODS:
        raise UserError(f"--methods: {text!r} is unknown", f"choose one of {', '.join(METHODS)}")
    return text


def _geometry(text: str) -> str:
    if text not in PAPER_MODELS:
        raise UserError(
            f"--geometry: {text!r} is not in the paper", f"choose one of {', '.join(PAPER_MODELS)}"
        )
    return text


def _rate(flag: str) -> Callable[[str], float]:
    """A parser of the rate that `flag` takes."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < 1:
            problem = f"{flag} must be a number between 0 and 1; got {text!r}"
            raise UserError(problem, f"for example: {flag} 1e-3")
        return value

    return parse


def experiment_names(what: list[str]) -> list[str]:
    """The experiments that WHAT names, each once, in the order of the page."""
    unknown = [name for name in what if name not in (*EXPERIMENTS, ALL)]
    if unknown:
        raise UserError(
            f"there is no experiment {unknown[0]!r}", f"choose one of {', '.join(EXPERIMENTS)}, {ALL}"
        )
    return [name for name in EXPERIMENTS if name in what or (ALL in what and name in PAPERS)]


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    given = build_parser().parse_args(arguments)
    names = experiment_names(given.what)
    if given.geometry and not {"main", "overview"} & set(names):
        raise UserError("--geometry is for main and overview", "add one of them, or leave the option out")
    options = {name: value for name, value in vars(given).items() if name in PLAN_FIELDS}

    from mrem_deploy.base import processes
    from mrem_deploy.benchmarks.output import check_folder
    from mrem_deploy.reproduce import run
    from mrem_deploy.reproduce.cells import Cells, note_subjects
    from mrem_deploy.reproduce.plan import QUICK, make_plan
    from mrem_deploy.reproduce.subjects import Finetuning, find_subjects

    processes.preload("mrem_deploy.pipeline")
    out = path_of("--out", given.out).absolute()
    if not given.dry_run:
        check_folder(str(out))
    length = options.get("max_length") or Finetuning.max_length
    finetuning = Finetuning(given.encoder, given.finetune_epochs, max_length=length)
    subjects = find_subjects(getattr(given, "triples", None) or [], out, finetuning, given.dry_run)
    pairs = [(make_plan(subject.task, given.quick, options), subject) for subject in subjects]
    seeds = pairs[0][0].seeds
    jobs, idle = run.jobs_of(names, pairs, options.keys() | (QUICK.keys() if given.quick else set()))
    missing = [*run.left_out([plan for plan, _ in pairs]), *idle]
    if not jobs:
        raise UserError(
            "there is nothing to run: " + " ".join(missing), "give other --methods or experiments"
        )
    cells = Cells(out, subjects, given.keep_models)
    recipes = run.cells_of(jobs, seeds)
    if given.dry_run:
        print("\n".join([*missing, run.listing(cells, recipes)]))
        return 0
    note_subjects(out, subjects)
    with interrupt.keeping(lambda: "finished runs are kept, and the same command continues"):
        cells.run(recipes)
        entries = run.present(jobs, cells, seeds)
        entries += run.of_geometry(
            given.geometry, given.geometry_steps, given.geometry_batch, pairs[0][0], out
        )
    title = "Reproduced: " + ", ".join(f"{Path(s.model).name} on {s.task}" for s in subjects)
    _publish(entries, out, title, "python -m mrem_deploy.reproduce " + shlex.join(arguments), missing)
    return 0


def _publish(entries: list[Entry], out: Path, title: str, command: str, missing: list[str]) -> None:
    """Print every table, and write it and the page over all of them."""
    from mrem_deploy.base import machine
    from mrem_deploy.reproduce.page import Provenance, write_entry, write_page

    provenance = Provenance(command, machine.describe_machine(), missing)
    for entry in entries:
        print(f"\n{entry.text()}")
        for path in write_entry(entry, out, provenance):
            print(f"written: {path}")
    pages = write_page(entries, out, title, provenance)
    print("\n" + "\n".join([*missing, *(f"written: {page}" for page in pages)]))


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
