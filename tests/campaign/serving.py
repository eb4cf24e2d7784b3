"""Damaged folders: results that are served or shipped, and folders of sentence-transformers as source."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

from tests.campaign import forked, judge
from tests.campaign.cases import LEFTOVER, SILENT, Outcome
from tests.campaign.forked import Ended, Place
from tests.campaign.jobs import JOBS, OUT
from tests.campaign.mutations import files_in, mutate, mutate_file
from tests.campaign.workshop import Workshop, copy_tree, run_command

SENTENCES = ("the film was good", "a very dull plot", "the actor")
SAID = "changed since it was written"
RUNTIME_FILE = "model_mrem.onnx"


def serve_command(argv: list[str] | None) -> int:
    """`sentence_transformer` or `cross_encoder` on a folder: prints a digest of the answers."""
    import mrem_deploy

    assert argv is not None
    kind, folder = argv
    if kind == "embedder":
        answers = mrem_deploy.sentence_transformer(folder, threads=1).encode_query(list(SENTENCES))
    else:
        pairs = [(one, SENTENCES[0]) for one in SENTENCES]
        answers = mrem_deploy.cross_encoder(folder, threads=1).predict(pairs)
    print(hashlib.sha256(answers.tobytes()).hexdigest())
    return 0


def serve_in_child(name: str, folder: Path, place: Place) -> Ended:
    from mrem_deploy.base import cli

    return forked.run(lambda: cli.run(serve_command, [name, str(folder)]), place)


def serve(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """An embedder or a cross-encoder gives the same answers, or is refused."""
    name = draw.choice(("embedder", "reranker"))
    folder = _copy(shop.baseline(name).folder, place)
    beside = [file for file in files_in(folder) if file.endswith((".json", ".onnx")) or "/" in file]
    outcome.what = f"serve {name}, {mutate(folder, beside, draw)}"
    ended = serve_in_child(name, folder, place)
    if judge.check_end(outcome, ended, (judge.DONE, judge.REFUSED)):
        outcome.result = "refused" if ended.code else "equal"
        if ended.code == judge.DONE and ended.out.strip() != shop.remembered(f"serve-{name}"):
            outcome.blame(SILENT, "other answers are given")


def session_command(argv: list[str] | None) -> int:
    """`mrem_runtime.session` on a file. It has no digests: what is wrong with it is onnxruntime's error."""
    import mrem_runtime
    import numpy as np

    from mrem_deploy.base.errors import UserError

    assert argv is not None
    try:
        session = mrem_runtime.session(argv[0], threads=1)
        ids = (np.arange(24, dtype=np.int64).reshape(2, 12) * 7) % 18
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        session.run(None, {entry.name: given.get(entry.name, ids) for entry in session.get_inputs()})
    except Exception as error:  # onnxruntime's exceptions have no common class
        raise UserError(f"onnxruntime: {error}", "copy the file again") from error
    return 0


def session(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """A file for the CPU runtime runs, or there is an exception: never a crash or a hang."""
    from mrem_deploy.base import cli

    path = place.work / RUNTIME_FILE
    shutil.copyfile(shop.baseline("mrem-cpu").folder / RUNTIME_FILE, path)
    outcome.what = f"session {RUNTIME_FILE}: {mutate_file(path, draw)}"
    ended = forked.run(lambda: cli.run(session_command, [str(path)]), place)
    if judge.check_end(outcome, ended, (judge.DONE, judge.REFUSED)):
        outcome.result = "refused" if ended.code else "run"


def source(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """A damaged sentence-transformers folder is refused, or quantized to a result that is sound."""
    job = JOBS[draw.choice(("embedder", "reranker"))]
    copy_tree(shop.root / f"model-{job.head}", place.work / "source")
    outcome.what = (
        f"source of {job.name}, {mutate(place.work / 'source', files_in(place.work / 'source'), draw)}"
    )
    options = "--method ptq --calib-size 16 --init-batches 1 --batch-size 8 --max-length 32 --export none"
    argv = ["quantize", "--model", str(place.work / "source"), "--data", str(shop.root / f"data-{job.head}")]
    argv += ["--task", job.head, "--out", str(place.work / OUT), "--threads", "1", *options.split()]
    ended = run_command(argv, place)
    if not judge.check_end(outcome, ended, (judge.DONE, judge.REFUSED)):
        return
    outcome.result = "refused" if ended.code else "quantized"
    judge.check_rest(outcome, place, ("source", OUT) if ended.code == judge.DONE else ("source",))
    if ended.code == judge.DONE and run_command(["verify", str(place.work / OUT)], place).code != judge.DONE:
        outcome.blame(SILENT, "the result is not sound")


def page(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    """The page of a damaged result is that of the undamaged one, or there is none."""
    folder = _copy(shop.baseline("ptq").folder, place)
    files = ["mrem.json", "mrem.safetensors", "config.json", "recipe.yaml"]
    files += ["tokenizer.json", "tokenizer_config.json"]
    outcome.what = f"web ptq, {mutate(folder, files, draw)}"
    ended = page_in_child(shop, folder, place)
    if not judge.check_end(outcome, ended, (judge.DONE, judge.REFUSED)):
        return
    site = place.work / "site"
    outcome.result = "refused" if ended.code else "equal"
    judge.check_rest(outcome, place, (OUT, "site"))
    if ended.code == judge.REFUSED and site.exists():
        outcome.blame(LEFTOVER, "a refused page is there")
    if ended.code == judge.DONE and values_of_page(site, place) != shop.remembered("page"):
        outcome.result = "said"
        if SAID not in ended.err and (folder / "recipe.yaml").exists():  # it may be without one
            outcome.blame(SILENT, "another page is made")


def page_in_child(shop: Workshop, folder: Path, place: Place) -> Ended:
    libraries = ["--libraries", str(shop.root / "npm")]
    return run_command(["web", str(folder), "--out", str(place.work / "site"), *libraries], place)


def values_of_page(site: Path, place: Place) -> str:
    return json.dumps(judge.values_of(site, place.root), sort_keys=True)


def remember(shop: Workshop, name: str) -> None:
    """What an undamaged result answers, and its page."""
    place = shop.place(f"serve-{name}")
    folder = _copy(shop.baseline(name).folder, place)
    served = name in ("embedder", "reranker")
    ended = serve_in_child(name, folder, place) if served else page_in_child(shop, folder, place)
    if ended.code != 0:
        raise RuntimeError(f"the undamaged {name} is refused:\n{ended.text[-4000:]}")
    if served:
        shop.remember(f"serve-{name}", ended.out.strip())
    else:
        shop.remember("page", values_of_page(place.work / "site", place))
    shutil.rmtree(place.root)


def _copy(original: Path, place: Place) -> Path:
    copy_tree(original, place.work / OUT)
    return place.work / OUT
