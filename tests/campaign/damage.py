"""Damaged result folders and checkpoints, through every command that reads them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.campaign import forked, judge, serving
from tests.campaign.cases import LEFTOVER, SILENT, Outcome
from tests.campaign.forked import Ended, Place
from tests.campaign.jobs import JOBS, OUT
from tests.campaign.mutations import files_in, mutate, same_content
from tests.campaign.workshop import Workshop, check_result, copy_tree, run_command

READERS = {  # percent
    **{"load": 40, "verify": 20, "export": 9, "resume": 9, "validate": 6, "latency": 1},
    **{"serve": 6, "session": 4, "source": 3, "page": 2},
}
RESULTS = ("mrem-s-onnx", "ptq", "mrem-cpu", "embedder", "reranker")
INTERRUPTED = ("mrem-s", "mrem-s-auto", "rem", "qat", "finetune", "mrem-p-lock-step")
SEALED = "recipe.yaml"  # has a digest, but does not decide the model
MODEL = ("mrem.json", "mrem.safetensors", "config.json")  # what decides the model
PROFILES = {"mrem-cpu": "mrem-cpu"}  # that `mrem validate` is asked for; ort-cpu elsewhere
VALIDATED = {"mrem-cpu": serving.RUNTIME_FILE}  # model.onnx elsewhere
QUICK = "--quick --rounds 1 --warmup 1 --loads 1 --shapes 1x8 --threads 1 --device cpu"


def damage(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome) -> None:
    reader = draw.choices(list(READERS), list(READERS.values()))[0]
    if reader == "resume" or (reader == "verify" and draw.random() < 0.3):
        _checkpoints(shop, place, draw, outcome, reader)
        return
    if reader in ("serve", "session", "source", "page"):
        getattr(serving, reader)(shop, place, draw, outcome)
        return
    name = draw.choice(RESULTS)
    original = shop.baseline(name).folder
    folder = place.work / OUT
    copy_tree(original, folder)
    done = mutate(folder, _targets(original, reader, draw), draw)
    outcome.what = f"{reader} {name}, {done}"
    {"load": _load, "verify": _verify, "export": _export, "validate": _validate, "latency": _latency}[reader](
        shop, original, folder, place, outcome
    )


def _targets(original: Path, reader: str, draw: random.Random) -> list[str]:
    """Mostly what decides the model. Every reader must also live with damage to the other files."""
    onnx = [path.name for path in original.glob("*.onnx")]
    if reader == "latency":
        return decide(original)
    if draw.random() < 0.15:
        return [name for name in files_in(original) if not name.endswith((".png", ".html", ".svg"))]
    return [*decide(original), *(onnx if reader in ("verify", "validate") else [])]


def decide(original: Path) -> list[str]:
    """The files that decide what a result computes: those of sentence-transformers are among them."""
    manifest = json.loads((original / "mrem.json").read_text(encoding="utf-8"))
    return [*MODEL, *manifest["digests"].get("beside", {})]


def _unchanged(original: Path, folder: Path, also_others: bool = False) -> bool:
    """also_others: what has a digest without deciding the model. A result may be without a recipe."""
    names = decide(original)
    if also_others:
        names += [path.name for path in original.glob("*.onnx")]
        names += [SEALED] if (folder / SEALED).exists() else []
    return all(same_content(original / name, folder / name) for name in names)


def _ended(outcome: Outcome, ended: Ended, codes: tuple[int, ...] = (judge.DONE, judge.REFUSED)) -> bool:
    """True if the command is done; then its result is to be compared."""
    if not judge.check_end(outcome, ended, codes):
        return False
    outcome.result = "refused" if ended.code else "equal"
    return ended.code == judge.DONE


# -- readers of a result -----------------------------------------------------------------------------------


def model_digest(folder: str) -> str:
    """Of all weights of the model in a result folder, and of what it computes."""
    import torch

    import mrem_deploy

    model = mrem_deploy.load(folder)
    hasher = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    ids = (torch.arange(24).reshape(2, 12) * 7) % 18
    with torch.no_grad():
        answers = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    for value in answers.to_tuple():
        if isinstance(value, torch.Tensor):
            hasher.update(value.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def load_command(argv: list[str] | None) -> int:
    """`mrem_deploy.load` as a command."""
    assert argv is not None
    print(model_digest(argv[0]))
    return 0


def load_in_child(folder: Path, place: Place) -> Ended:
    from mrem_deploy.base import cli

    return forked.run(lambda: cli.run(load_command, [str(folder)]), place)


def _load(shop: Workshop, original: Path, folder: Path, place: Place, outcome: Outcome) -> None:
    ended = load_in_child(folder, place)
    if not _ended(outcome, ended):
        return
    if ended.out.strip() != shop.remembered(f"load-{original.parent.parent.name}"):
        outcome.blame(SILENT, "another model is loaded")


def _export(shop: Workshop, original: Path, folder: Path, place: Place, outcome: Outcome) -> None:
    written = place.work / "exported.onnx"
    ended = run_command(["export", str(folder), "--out", str(written)], place)
    if not _ended(outcome, ended):
        if written.exists():
            outcome.blame(LEFTOVER, "a refused export has left its file")
        return
    if graph_digest(written) != shop.remembered(f"export-{original.parent.parent.name}"):
        outcome.blame(SILENT, "another model is exported")


def _verify(shop: Workshop, original: Path, folder: Path, place: Place, outcome: Outcome) -> None:
    ended = run_command(["verify", str(folder)], place)
    done = _ended(outcome, ended, (judge.DONE, judge.FAILED, judge.REFUSED))
    if done and not _unchanged(original, folder, also_others=True):
        outcome.blame(SILENT, "verify finds nothing")
    if ended.code == judge.FAILED and "DAMAGED" not in ended.out:
        outcome.blame("wrong message", "verify does not say what is damaged")


def _validate(shop: Workshop, original: Path, folder: Path, place: Place, outcome: Outcome) -> None:
    (folder / "validation.json").unlink(missing_ok=True)
    name = original.parent.parent.name
    ended = run_command(validating(name, folder), place)
    if not _ended(outcome, ended, (judge.DONE, judge.FAILED, judge.REFUSED)):
        return
    found = findings(folder)
    expected = json.loads(shop.remembered(f"validate-{name}"))
    file = VALIDATED.get(name, "model.onnx")
    if set(found["remarks"]) - set(expected["remarks"]):
        outcome.result = "said"  # that something is not as it was
    elif not same_content(original / file, folder / file):
        outcome.blame(SILENT, "another ONNX file is validated without a word")
    elif found != expected:
        outcome.blame(SILENT, "other numbers are reported")


def _latency(shop: Workshop, original: Path, folder: Path, place: Place, outcome: Outcome) -> None:
    command = f"batches --sentences 8 --batch-size 4 --repeats 1 --out {place.work}/figures"
    if original.parent.parent.name != "embedder":
        command = f"latency {QUICK}"
    what, *options = command.split()
    ended = run_command(["benchmark", what, str(folder), *options], place)
    if _ended(outcome, ended) and not _unchanged(original, folder):
        outcome.blame(SILENT, "a damaged model is timed")


def validating(name: str, folder: Path) -> list[str]:
    options = ["--max-drop", "100", "--threads", "1", "--profile", PROFILES.get(name, "ort-cpu")]
    return ["validate", str(folder), *options]


def graph_digest(path: Path) -> str:
    import golden

    return str(golden.digest(golden.graph_bytes(path)))


def findings(folder: Path) -> Any:
    """What validate found, without times and places."""
    import golden

    text = (folder / "validation.json").read_text(encoding="utf-8").replace(str(folder), "FOLDER")
    found = golden.comparable(json.loads(text))
    return json.loads(json.dumps(found))


def remember(shop: Workshop, name: str) -> None:
    """What the readers make of an undamaged result."""
    if (shop.root / f"validate-{name}.txt").exists():
        return
    place = shop.place(f"remember-{name}")
    folder = place.work / OUT
    copy_tree(shop.baseline(name).folder, folder)
    loaded = load_in_child(folder, place)
    written = place.work / "exported.onnx"
    exported = run_command(["export", str(folder), "--out", str(written)], place)
    validated = run_command(validating(name, folder), place)
    for ended in (loaded, exported, validated):
        if ended.code != 0:
            raise RuntimeError(f"the undamaged {name} is refused:\n{ended.text[-4000:]}")
    shop.remember(f"load-{name}", loaded.out.strip())
    shop.remember(f"export-{name}", graph_digest(written))
    if name in ("embedder", "reranker", "ptq"):
        serving.remember(shop, name)
    shop.remember(f"validate-{name}", json.dumps(findings(folder)))
    shutil.rmtree(place.root)


# -- checkpoints -------------------------------------------------------------------------------------------


def _checkpoints(shop: Workshop, place: Place, draw: random.Random, outcome: Outcome, reader: str) -> None:
    """Damage the work folder of an interrupted run, and verify it or continue the run."""
    name = draw.choice(INTERRUPTED[:-1] if draw.random() < 0.95 else INTERRUPTED[-1:])
    shutil.rmtree(place.root)
    copy_tree(shop.checkpoints(name), place.root)
    work = place.work / f".{OUT}.work"
    originals = shop.checkpoints(name) / "work" / work.name
    targets = [file for file in files_in(work) if file.endswith((".safetensors", ".json"))]
    done = mutate(work, targets, draw)
    outcome.what = f"{reader} {name}, {done}"
    if reader == "verify":
        ended = run_command(["verify", str(work)], place)
        good = _ended(outcome, ended, (judge.DONE, judge.FAILED, judge.REFUSED))
        checked = [file for file in targets if file.endswith(".safetensors") and (work / file).exists()]
        if good and not all(same_content(originals / file, work / file) for file in checked):
            outcome.blame(SILENT, "verify finds nothing")
        return
    baseline = shop.baseline(name)
    ended = run_command(JOBS[name].argv(shop.root, place.work / OUT), place)
    if _ended(outcome, ended):
        check_result(outcome, baseline, place)
        judge.check_rest(outcome, place, (OUT,))
