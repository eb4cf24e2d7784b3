"""What a user can get wrong, one row each: a message that says what to do, exit code 2, nothing touched.

The folder of every case holds an older, valid result under --out. After the refusal the whole tree must be
as it was, byte for byte, and hold no file more.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import (
    BOMB,
    FULL_DISK,
    Case,
    Place,
    a_loop,
    already_quantized,
    broken_checkpoint,
    collection,
    cut_short,
    deep,
    diverging,
    folder_for_a_file,
    foreign_files,
    full_at_the_tokenizer,
    full_disk,
    gpt2,
    mixed_checkpoints,
    mounted,
    new_label_in_dev,
    no_permission,
    of_an_image,
    other_data,
    other_recipe,
    other_recipe_resumed,
    other_weights,
    pickle_only,
    setting,
    started_as,
    taken,
    three_labels,
    unknown_module,
    unlabelled_row_in_dev,
    unreadable,
    unreadable_folder,
    without,
)
from safetensors import SafetensorError
from tiny_job import Job, save_model, write_reviews

from mrem_deploy import __main__
from mrem_deploy.base import cli
from mrem_deploy.quant import artifact
from mrem_deploy.train import checkpoint
from mrem_deploy.train.module import ModuleTrainer
from mrem_deploy.walk import publishing

ROOT = Path(__file__).resolve().parents[2]

CASES = [
    # data
    Case("data missing", setting(data="nowhere.csv"), ("nowhere.csv", "no such file", "→")),
    Case("data folder missing", setting(data="./no/where"), ("./no/where", "no such file or folder", "→")),
    Case("data not on the hub", setting(data="nobody/nothing"), ("nobody/nothing", "hub", "→", "folder")),
    Case("data empty", lambda p: p.data_file("a.jsonl", ""), ("a.jsonl", "empty", "→")),
    Case("data only a header", lambda p: p.data_file("a.csv", "text,label\n"), ("a.csv", "empty", "→")),
    Case("data folder empty", lambda p: p.data_file("sub/x.doc", "") or p.set(data=p.root / "sub"),
         ("Expected train", "x.doc", "→")),
    Case("data no json", lambda p: p.data_file("a.jsonl", '{"text": "a"\n'), ("a.jsonl", "line 1", "→")),
    Case("data nested too deeply", lambda p: p.data_file("a.jsonl", f'{{"text": {deep(100_000)}}}\n'),
         ("a.jsonl", "line 1", "nested too deeply", "→")),
    Case("data with half a character", lambda p: p.data_file("a.jsonl", '{"text": "a \\ud83d b"}\n'),
         ("a.jsonl", "line 1", "ud83d", "lone surrogate", "→")),
    Case("data with a number of 5,000 digits",
         lambda p: p.data_file("a.jsonl", f'{{"text": "a", "label": {"9" * 5000}}}\n'),
         ("a.jsonl", "line 1", "digits", "→")),
    Case("two columns of one name", lambda p: p.data_file("a.csv", "text,label,text\na,0,b\nc,1,d\n"),
         ("a.csv", "own name", "'text'", "columns 1 and 3", "→")),
    Case("a text with a comma without quotes", lambda p: p.data_file("a.csv", "text,label\na,0\nb, c,1\n"),
         ("a.csv", "expected 2 fields", "1 of 2", "row 3", "with 3", "quotes", "→")),
    Case("a number for a text", lambda p: p.data_file("a.jsonl", '{"text": "a", "label": 0}\n' * 4
         + '{"text": 1984, "label": 1}\n' * 4), ("a.jsonl", "row", "1984", "not text", "→", "--text-column")),
    Case("a list for a text", lambda p: p.data_file("a.jsonl", '{"text": ["a", "b"], "label": 0}\n' * 4),
         ("a.jsonl", "row", "['a', 'b']", "not text", "→", "--text-column")),
    Case("a score for a class", lambda p: p.data_file("a.csv", "text,label\n" + "a,0.5\nb,1\n" * 4),
         ("class", "'label'", "row", "'0.5'", "→", "--label-column")),
    Case("a list for a class", lambda p: p.data_file("a.jsonl", '{"text": "a", "label": [0]}\n' * 4),
         ("class", "row", "[0]", "→", "--label-column")),
    Case("data is a device", setting(data="/dev/zero", task="token-classification"),
         ("/dev/zero", "device", "→", "ordinary file")),
    Case("data is a link to itself", a_loop("data"), ("--data", "loop", "symbolic links", "→", "link")),
    Case("data with a name too long", setting(data="x" * 300), ("--data", "too long", "→", "255")),
    Case("data in the home of nobody", setting(data="~no-such-user/x"), ("--data", "~no-such-user", "→")),
    Case("data that may not be read", unreadable, ("train.jsonl cannot be read", "Permission denied", "→")),
    Case("data in a folder that may not be read", unreadable_folder,
         ("folder", "data cannot be read", "Permission denied", "→")),
    Case("a folder where a file is expected", folder_for_a_file, ("single.csv", "it holds nothing", "→")),
    Case("a name that is not UTF-8", setting(data="caf\udce9.csv"), ("UTF-8", "udce9", "→", "rename")),
    Case("evaluation data missing", setting(eval_data="nowhere.csv"), ("nowhere.csv", "no such file", "→")),
    Case("text column", setting(text_column="review"),
         ("'review'", "it has 'text', 'label'", "→", "--text-column")),
    Case("pair column", setting(text_pair_column="b"), ("'b'", "'text', 'label'", "→", "--text-pair-column")),
    Case("label column", setting(label_column="stars"),
         ("'stars'", "it has 'text', 'label'", "→", "--label-column")),
    Case("three labels, model of two", three_labels,
         ("data has 3 (0, 1, 2)", "model has 2", "→", "fine-tuned")),
    Case("a label that only the evaluation split has", new_label_in_dev,
         ("labels do not fit", "3 (0, 1, 7)", "model has 2", "→", "id2label")),
    Case("a row without label in the evaluation split", unlabelled_row_in_dev,
         ("label in every row", "1 of 13", "dev.jsonl", "row 13", "→", "labelled split")),
    Case("regression, model of two labels",
         lambda p: p.set(task="stsb", text_column="text", text_pair_column="text", data=p.data),
         ("stsb", "one output", "has 2", "→")),
    Case("no questions", setting(task="question-answering"),
         ("'question'", "'text', 'label'", "→", "--text-column")),
    Case("task unknown", setting(task="sst3"), ("sst2", "question-answering", "'sst3'", "→", "mean sst2")),
    # model
    Case("model missing", setting(model="./no-model"), ("no model folder ./no-model", "→", "config.json")),
    Case("model not on the hub", setting(model="nobody/no-model"),
         ("nobody/no-model", "hub", "→", "hf download")),
    Case("model with a name too long", setting(model="x" * 300), ("--model", "too long", "→", "255")),
    Case("model is a link to itself", a_loop("model"), ("--model", "symbolic links", "→")),
    Case("model is a file", lambda p: p.set(model=p.data / "train.jsonl"), ("is a file", "→", "folder")),
    Case("model folder is none", lambda p: p.set(model=p.data), ("no config.json", "train.jsonl", "→")),
    Case("model already quantized", already_quantized,
         ("config.json", "quantized already", "→", "full-precision")),
    Case("NaN in weights", lambda p: p.edit_weights(lambda w: w["classifier.weight"][0].fill_(float("nan"))),
         ("classifier.weight has 16 NaN or Inf", "→", "checkpoint")),
    Case("pickle only", pickle_only, ("pickle (pytorch_model.bin)", "safetensors", "→", "save_pretrained")),
    Case("weights cut short", cut_short, ("safetensors", "cannot be read", "→", "again")),
    Case("architecture not supported", gpt2, ("'gpt2'", "→", "bert", "modernbert")),
    Case("no classifier head", lambda p: save_model(p.model, "BertForMaskedLM"),
         ("no trained", "→", "finetune")),
    # embedders and retrieval
    Case("a module that is not known", unknown_module, ("modules.json", "LSTM", "not known", "→")),
    Case("qrels with an unknown id", collection(qrels="q0\td9\t1\n"),
         ("corpus-id", "test.tsv", "row 1", "'d9'", "not there", "→", "one collection")),
    Case("an empty text in the corpus", collection(corpus=" "), ("corpus.jsonl", "1 are empty", "'d0'", "→")),
    Case("no corpus", setting(task="retrieval"), ("corpus.jsonl", "data is none", "→", "mrem beir")),
    Case("a threshold that no probability has", setting(threshold=1.5),
         ("--threshold", "between 0 and 1", "1.5", "→")),
    Case("a threshold that nothing can cross", setting(threshold=0.9999999),
         ("--threshold 0.9999999 is outside", "evaluation split", "→", "divides")),
    # bits, modules and other numbers
    Case("5-bit weights", setting(bits="5-4-8"), ("5 bits for weights", "→", "2, 3, 4, 8")),
    Case("3-bit embeddings", setting(bits="4-3-8"), ("3 bits for embeddings", "→", "2, 4, 8")),
    Case("two bit widths", setting(bits="4-4"), ("W-E-A", "'4-4'", "→", "4-4-8")),
    Case("letters for bits", setting(bits="a-b-c"), ("W-E-A", "'a-b-c'", "→", "4-4-8")),
    Case("more modules than layers", setting(modules=3), ("2 blocks", "got 3", "→", "--modules 2")),
    Case("no modules", setting(modules=0), ("--modules", "'0'", "→")),
    Case("cut point beyond the model", setting(modules="1,2"), ("between 1 and 1", "[1, 2]", "→")),
    Case("cut points that do not rise", setting(modules="1,1"), ("rise", "[1, 1]", "→")),
    Case("cut points in words", setting(modules="1;2"), ("cut points", "'1;2'", "→", "3,6,9")),
    Case("steps in words", setting(steps="many"), ("--steps", "whole number", "'many'", "→")),
    Case("steps negative", setting(steps=-5), ("--steps", "at least 1", "-5", "→")),
    Case("seed negative", setting(seed=-1), ("--seed", "0 or more", "-1", "→")),
    Case("100,000 threads", setting(threads=100_000), ("--threads", "at most 1024", "100000", "→")),
    Case("100,000 workers", setting(workers=100_000), ("--workers", "at most 1024", "100000", "→")),
    Case("steps beyond counting", setting(steps=10**18), ("--steps", "at most 1000000000", "→")),
    Case("steps of 5,000 digits", setting(steps="9" * 5000), ("--steps", "whole number", "999", "→")),
    Case("bits of 5,000 digits", setting(bits="9" * 5000 + "-4-8"), ("--bits", "three numbers", "→")),
    Case("seed beyond 32 bits", setting(seed=2**64), ("--seed", "4294967295", "→")),
    Case("learning rate not a number", setting(lr="nan"), ("--lr", "between 0 and 1", "nan", "→")),
    Case("memory without end", setting(max_memory="infGB"), ("--max-memory", "8GB", "'infGB'", "→")),
    Case("time without end", setting(time_budget="9" * 400 + "h"), ("--time-budget", "at most a year", "→")),
    Case("learning rate negative", setting(lr=-0.1), ("--lr", "between 0 and 1", "-0.1", "→")),
    Case("memory without a unit", setting(max_memory="plenty"), ("--max-memory", "8GB", "'plenty'", "→")),
    Case("method unknown", setting(method="magic"),
         ("--method", "mrem-s, mrem-p, rem, ptq, qat", "'magic'", "→")),
    Case("GOBO has no file", setting(method="gobo"), ("no grid", "packed", "→", "gobo_model")),
    Case("budget too small", setting(bits="auto", budget_mb=0.01),
         ("--budget-mb 0.01 is too small", "2 bits everywhere", "→", "or more")),
    Case("bits to choose without a budget", setting(bits="auto"), ("needs a size", "→", "--budget-mb")),
    Case("budget without bits to choose", setting(budget_mb=9), ("--budget-mb", "2-2-8", "→", "--bits auto")),
    Case("epochs of one stage", setting(qat_epochs=6), ("--qat-epochs", "both stages", "'6'", "→")),
    Case("training set of another method", setting(train_size=50),
         ("--train-size is for --method qat", "mrem-s", "→", "--calib-size")),
    Case("started as several processes", started_as(2), ("mrem-s", "one process", "2", "→", "mrem-p")),
    Case("more workers than modules", started_as(3, method="mrem-p"), ("3 workers", "2 modules", "→")),
    Case("longer than the model reads", setting(max_length=513),
         ("--max-length 513", "at most 32", "→", "32 or")),
    Case("pattern that matches nothing", setting(keep_fp="bert.layers.*"),
         ("'bert.layers.*' matches no layer", "→", "bert.encoder.layer.0")),
    Case("training that diverges", diverging, ("loss became nan at step 1", "diverged", "→", "--lr")),
    Case("export profile unknown", setting(export="qdq,npu"), ("no export profile 'npu'", "→", "ort-cpu")),
    Case("GPU that is not there", setting(device="cuda"), ("--device cuda", "no GPU", "→", "--device cpu")),
    Case("device unknown", setting(device="tpu"), ("--device 'tpu'", "→", "auto, cpu, cuda")),
    # places
    Case("out under a file", lambda p: p.set(out=p.data / "train.jsonl" / "out"), ("train.jsonl/out", "→")),
    Case("out is a file", lambda p: p.set(out=p.data / "train.jsonl"),
         ("train.jsonl is a file", "→", "folder")),
    Case("out in /proc", setting(out="/proc/mrem/out"), ("cannot write /proc/mrem/out", "→")),
    Case("out without permission", no_permission, ("no permission to write", "locked/result", "→")),
    Case("out with a name too long", setting(out="x" * 300), ("--out", "too long", "→", "255")),
    Case("out without room for temporary names", setting(out="x" * 250), ("--out", "200 bytes", "→")),
    Case("out is a link to itself", a_loop("out"), ("--out", "symbolic links", "→")),
    Case("out holds other files", foreign_files,
         ("thesis", "not empty", "not written by this command", "→", "nothing was touched")),
    Case("out holds the model", lambda p: p.set(out=p.root), ("contains the --model", "→", "another folder")),
    Case("out is a mount point", mounted,
         ("/out is a mount point", "Docker", "→", "folder inside it", "/out/result")),
    Case("out came with a container's image", of_an_image,
         ("/out came with the image", "cannot be replaced", "→", "remove it first", "another folder")),
    Case("out belongs to another run", taken,
         ("another run is writing to", "/out", f"process {os.getpid()}", "started", "→", "another folder")),
    Case("cache folder is a file", lambda p: p.set(cache_dir=p.file("a-file", "")),
         ("--cache-dir", "a-file is a file", "→", "folder")),
    Case("disk full at the first checkpoint", full_disk(checkpoint),
         ("no space left", ".out.work", "→", "free")),
    Case("disk full at a later checkpoint", full_disk(checkpoint, 3), ("no space left", "→", "continues"),
         keeps_checkpoints=True),
    Case("disk full at the tensors", full_disk(artifact),
         ("no space left", "mrem.safetensors", "→", "continues"),
         keeps_checkpoints=True),
    Case("disk full at the tokenizer", full_at_the_tokenizer, ("no space left", "/out", "→", "continues"),
         keeps_checkpoints=True),
    Case("disk full at the report",
         lambda p: p.fail(publishing, "write_report", OSError(errno.ENOSPC, "No space left"), writes=False),
         ("no space left", "/out", "→", "continues"), keeps_checkpoints=True),
    # recipes and resuming
    Case("recipe file missing", lambda p: p.flags.extend(["--config", "gone.yaml"]),
         ("gone.yaml", "→", "--config")),
    Case("recipe key unknown", lambda p: p.config("step: 5\n"), ("unknown options: step", "→", "steps")),
    Case("recipe no mapping", lambda p: p.config("- bits\n"),
         ("my.yaml", "option: value", "→", "recipe.yaml")),
    Case("recipe no YAML", lambda p: p.config("bits: [4\n"), ("my.yaml", "YAML", "→")),
    Case("recipe of wrong type", lambda p: p.config("steps: many\n"),
         ("--steps", "whole number", "'many'", "→")),
    Case("recipe nested too deeply", lambda p: p.config(f"data: {deep(5000)}\n"),
         ("my.yaml", "nested too deeply", "→")),
    Case("recipe that multiplies itself", lambda p: p.config(BOMB), ("my.yaml", "alias", "→")),
    Case("recipe with a key twice", lambda p: p.config("steps: 5\nsteps: 6\n"),
         ("my.yaml", "'steps' is given 2 times", "→")),
    Case("recipe with one key in two spellings", lambda p: p.config("calib-size: 5\ncalib_size: 6\n"),
         ("my.yaml", "'calib_size' is given 2 times", "→")),
    Case("recipe with half a character", lambda p: p.config('text_column: "\\ud83d"\n'),
         ("--text-column", "UTF-8", "ud83d", "→")),
    Case("recipe with an impossible date", lambda p: p.config("text_column: 2024-99-99\n"),
         ("my.yaml", "month", "→")),
    Case("recipe is a folder", lambda p: p.flags.extend(["--config", str(p.data)]),
         ("data", "directory", "→")),
    Case("recipe is a device", lambda p: p.flags.extend(["--config", "/dev/zero"]),
         ("/dev/zero", "262,144 bytes", "→")),
    Case("recipe not in UTF-8", lambda p: p.flags.extend(["--config", str(p.file("a.yaml", b"bits: \xff"))]),
         ("a.yaml", "utf-8", "→")),
    Case("recipe with a list for a path", lambda p: p.config("data: [a, b]\n"), ("--data", "text", "→")),
    Case("only a model", without("task", "data"), ("--task, --data must be given", "→", "--model")),
    Case("only data", without("model", "task"), ("--model, --task must be given", "→")),
    Case("no out", without("out"), ("--out must be given", "→")),
    Case("checkpoints of another recipe", other_recipe,
         (".out.work", "differs", "kept", "bits: was '2-2-8', is '4-4-8'", "seed: was 0, is 1", "→",
          "mrem quantize --config", ".out.work/recipe.yaml", "→", "--fresh", "another --out")),
    Case("resumed with another recipe", other_recipe_resumed,
         ("differs", "seed: was 0, is 1", "→", "mrem quantize --config", "→", "--fresh")),
    Case("checkpoints of other data", other_data, ("differs", "calibration data: was", "→", "--fresh")),
    Case("checkpoints of other weights", other_weights, ("differs", "model weights: was", "→", "--fresh")),
    Case("a broken checkpoint", broken_checkpoint, ("module-0.safetensors cannot be used", "→", "--fresh")),
    Case("a checkpoint of another run among the own", mixed_checkpoints,
         ("module-0.safetensors", "another run", "nothing was restored", "→", "--fresh")),
    Case("both --resume and --fresh", lambda p: p.flags.extend(["--resume", "--fresh"]),
         ("usage:", "--fresh: not allowed with argument --resume"), by_argparse=True),
    # the command line itself
    Case("option unknown", lambda p: p.flags.append("--frobnicate"),
         ("usage:", "unrecognized arguments: --frobnicate"), by_argparse=True),
    Case("option without its value", lambda p: p.flags.append("--bits"),
         ("usage:", "--bits: expected one argument"), by_argparse=True),
    Case("verb unknown", lambda p: None, ("unknown verb 'quantise'", "expected one of quantize", "usage:"),
         entry=lambda p: __main__.main(["quantise"]), by_argparse=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data and an older result, made once and copied for every case."""
    root = tmp_path_factory.mktemp("template")
    job = Job(
        model=save_model(root / "model"), data=write_reviews(root / "data"), out=root / "out", method="ptq"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MREM_CACHE", str(root / "cache"))
        assert job.run() == 0
    shutil.rmtree(root / "cache")
    return root


@pytest.fixture
def place(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    root = shutil.copytree(template, tmp_path / "case")
    monkeypatch.chdir(root)
    place = Place(root, monkeypatch)
    with place.until_the_end:
        yield place


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_mistake(case: Case, place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    if case.name == "out in /proc" and not Path("/proc/self").exists():
        pytest.skip("this system has no /proc")
    if case.name == "GPU that is not there" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    case.arrange(place)
    before = place.tree()
    capfd.readouterr()

    assert case.entry(place) == cli.EXIT_USER_ERROR

    told = capfd.readouterr()
    assert told.out == ""
    assert "Traceback" not in told.err
    error = told.err if case.by_argparse else told.err[told.err.rindex("error: ") :]
    assert re.search(".*".join(map(re.escape, case.said)), error, re.DOTALL), error
    after = place.tree()
    if case.keeps_checkpoints:
        kept = {name: after.pop(name) for name in list(after) if name.startswith(".out.work")}
        usual = r"\.out\.work(/run\.json|/recipe\.yaml|/command\.txt|/[\w-]+\.safetensors)?"
        assert all(re.fullmatch(usual, name) for name in kept), kept.keys()
    assert after.keys() == before.keys()
    assert after == before


@pytest.mark.parametrize("owner", [checkpoint, artifact], ids=["checkpoint", "tensors"])
def test_after_a_full_disk_the_run_goes_on(place: Place, owner: Any) -> None:
    """Once there is space again, the same command ends with the result of a run that was never stopped."""
    place.patch.setattr(publishing, "write_report", lambda *args: None)
    place.job.set(out=place.root / "whole")
    assert place.job.run() == 0
    place.job.set(out=place.out)
    with pytest.MonkeyPatch.context() as patch:
        place.patch = patch
        place.fail(owner, "save_file", SafetensorError(FULL_DISK), nth=3 if owner is checkpoint else 1)
        assert place.job.run() == cli.EXIT_USER_ERROR
    steps = []
    step = ModuleTrainer.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleTrainer, "step", lambda *a, **k: steps.append(a[1]) or step(*a, **k))
        assert place.job.run() == 0
    assert steps == ([0, 1, 2, 3, 4, 5] if owner is checkpoint else [])  # the first module was kept
    name = artifact.TENSORS
    assert (place.out / name).read_bytes() == (place.root / "whole" / name).read_bytes()
    assert not (place.root / ".out.work").exists()


def test_a_cache_that_cannot_be_made_is_explained(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """The folder is there and looks roomy, but making a file in it fails."""

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place.job.set(max_memory="0MB", cache_dir=place.root / "scratch")
    place.patch.setattr("mrem_deploy.train.streams.np.memmap", refuse)
    assert place.job.run() == cli.EXIT_USER_ERROR
    assert "--cache-dir" in capfd.readouterr().err
    assert list((place.root / "scratch").iterdir()) == []


def test_the_process_itself_ends_with_2_and_no_traceback(place: Place) -> None:
    """What the shell sees, once, of `python -m mrem_deploy.quantize`."""
    place.set(bits="5-4-8")
    command = [sys.executable, "-m", "mrem_deploy.quantize", *place.job.argv()]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: 5 bits for weights")
    assert "Traceback" not in done.stderr


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    """Only mistakes of the user are reduced to a message."""

    def main(argv: list[str] | None) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run(main)
