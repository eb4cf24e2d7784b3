"""Random options of the commands, good and bad: each set is done as asked, or refused with a message."""

from __future__ import annotations

import argparse
import importlib
import random

from tests.campaign import judge
from tests.campaign.cases import LEFTOVER, MESSAGE, Outcome
from tests.campaign.forked import Place
from tests.campaign.jobs import OUT, TASKS
from tests.campaign.workshop import Workshop, copy_tree, run_command

VERBS = {  # percent
    **{"quantize": 46, "finetune": 13, "export": 9, "validate": 9, "benchmark": 15},
    **{"web": 4, "beir": 4},
}
VALUES = (
    *("0", "1", "2", "3", "8", "100", "100000", "99999999999999999999", "-1", "0.5", "1e-3", "1e309"),
    *(
        "nan",
        "inf",
        "-inf",
        "",
        " ",
        "abc",
        "0x10",
        "１２",
        "1,2",
        "1_000",
        "None",
        "true",
        "\t",
        "é",
        "\udcff",
    ),
    *("4-4-8", "2-2-8", "8-8-8", "3-3-3", "4-4", "auto-8", "auto", "99-1-1", "-4-4-8", "1+1", "10s", "20m"),
    *(
        "mrem-s",
        "mrem-p",
        "rem",
        "ptq",
        "qat",
        "cpu",
        "cuda",
        "cuda:7",
        "auto",
        "none",
        "reference",
        "ort-cpu",
    ),
    *(
        "qdq,int8",
        "tensorrt",
        "sst2",
        "mnli",
        "squad",
        "text",
        "label",
        "a/b",
        "/",
        "/dev/null",
        "..",
        "~nobody",
    ),
    *("x" * 300, "a\0b", "%s", "{}", "<b>", "2GiB", "10MB", "quick", "best", "twn", "laq", "mse", "kl"),
)
CHEAP = {"schedule", "latency"}  # benchmarks that may also run with good options: the first takes a second
LONG = ("--rounds", "--loads", "--warmup", "--geometry", "--quick")  # of `benchmark latency`: not without DIR


def try_options(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    verb = draw.choices(list(VERBS), list(VERBS.values()))[0]
    argv = {
        "quantize": _quantize,
        "finetune": _finetune,
        "export": _result_reader,
        "validate": _result_reader,
        "benchmark": _benchmark,
        "web": _web,
        "beir": _beir,
    }[verb](verb, shop, place, draw)
    argv = [word.replace("\0", "\\0") for word in argv]  # no system passes on a null character
    outcome.what = " ".join(argv).replace(str(shop.root), "ROOT")
    ended = run_command(argv, place)
    codes = {judge.DONE, judge.REFUSED, *([judge.FAILED] if verb == "validate" else [])}
    if not judge.check_end(outcome, ended, codes):
        return
    outcome.result = "refused" if ended.code == judge.REFUSED else "done"
    if ended.code == judge.DONE and not ended.text.strip():
        outcome.blame(MESSAGE, "done without a word")
    hidden = [path.name for path in place.work.iterdir() if path.name.startswith(f".{OUT}")]
    if hidden or any(place.tmp.iterdir()):
        outcome.blame(LEFTOVER, ", ".join([*hidden, *(f"tmp/{path.name}" for path in place.tmp.iterdir())]))


def _quantize(verb: str, shop: Workshop, place: Place, draw: random.Random) -> list[str]:
    """Only the plan: what it accepts is what a run would begin."""
    from mrem_deploy.quantize import build_parser

    head = draw.choice(TASKS)
    base = ["--model", f"{shop.root}/model-{head}", "--data", f"{shop.root}/data-{head}", "--task", head]
    base += ["--out", str(place.work / OUT), "--calib-size", "16", "--max-length", "32", "--modules", "2"]
    return [verb, "--plan", *base, *random_options(build_parser(), draw)]


def _finetune(verb: str, shop: Workshop, place: Place, draw: random.Random) -> list[str]:
    from mrem_deploy.finetune import build_parser

    head = draw.choice(TASKS)
    base = ["--model", f"{shop.root}/model-{head}", "--data", f"{shop.root}/data-{head}", "--task", head]
    base += ["--out", str(place.work / OUT), "--epochs", "0.2", "--max-length", "32"]
    return [verb, *base, *random_options(build_parser(), draw, without=("--epochs",))]


def _result_reader(verb: str, shop: Workshop, place: Place, draw: random.Random) -> list[str]:
    module = {"export": "mrem_deploy.export.__main__", "validate": "mrem_deploy.validate"}[verb]
    folder = place.work / OUT
    copy_tree(shop.baseline("ptq").folder, folder)
    named = str(folder) if draw.random() < 0.9 else draw.choice(VALUES)
    return [verb, named, *random_options(importlib.import_module(module).build_parser(), draw)]


def _web(verb: str, shop: Workshop, place: Place, draw: random.Random) -> list[str]:
    from mrem_deploy.web.__main__ import build_parser

    base = [str(shop.baseline("ptq").folder), "--out", str(place.work / OUT)]
    base += ["--libraries", f"{shop.root}/npm"]
    return [verb, *base, *random_options(build_parser(), draw)]


def _beir(verb: str, shop: Workshop, place: Place, draw: random.Random) -> list[str]:
    from mrem_deploy.data.from_squad import build_parser

    base = [f"{shop.root}/data-squad", "--out", str(place.work / OUT)]
    return [verb, *base, *random_options(build_parser(), draw)]


def _benchmark(verb: str, shop: Workshop, place: Place, draw: random.Random) -> list[str]:
    from mrem_deploy import benchmark

    what = draw.choice(sorted(benchmark.VERBS))
    module = importlib.import_module(f"mrem_deploy.benchmarks.{benchmark.MODULES.get(what, what)}")
    parser = argparse.ArgumentParser()
    module.add_options(parser)
    words = random_options(parser, draw)
    if what not in CHEAP or what == "latency":  # these would measure for minutes: one option is surely wrong
        words += draw.choice((["--seed", "-1"], ["--no-such-option"], ["--seed", "abc"], ["--out"]))
    return [verb, what, *words]


def random_options(
    parser: argparse.ArgumentParser, draw: random.Random, without: tuple[str, ...] = ()
) -> list[str]:
    """Up to five options of a parser with values that fit or do not fit."""
    actions = [
        action
        for action in parser._actions
        if action.option_strings and action.dest != "help" and action.option_strings[-1] not in without
    ]
    words: list[str] = []
    for action in draw.choices(actions, k=draw.randint(0, 5)):
        words.append(draw.choice(action.option_strings))
        if action.nargs == 0:
            continue
        fitting = tuple(str(action.metavar or "").split("|")) + tuple(map(str, action.choices or ()))
        value = draw.choice(fitting) if len(fitting) > 1 and draw.random() < 0.5 else draw.choice(VALUES)
        if draw.random() < 0.97:
            words.append(value)
    if draw.random() < 0.03:
        words.append(draw.choice(("--unknown", "stray", "-", "--")))
    return words
