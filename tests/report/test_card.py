"""The model card, and the words and numbers that all pages share."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from a_result import fidelity, front_matter, metrics, write

from mrem_deploy.base import files, format
from mrem_deploy.base.errors import UserError
from mrem_deploy.evaluate.drift import Drift
from mrem_deploy.evaluate.fidelity import Fidelity
from mrem_deploy.report import summary
from mrem_deploy.report.plots import ends, finite
from mrem_deploy.result import Onnx, OnnxCheck


def test_front_matter_says_what_the_hub_wants(written: Path) -> None:
    front = front_matter(written)
    assert front["base_model"] == "someone/bert-base-sst2"
    assert front["base_model_relation"] == "quantized"
    assert {"quantized", "mrem-s", "4-4-8"} <= set(front["tags"])
    assert front["metrics"] == ["accuracy"]
    assert "license" not in front  # not known, so not claimed
    (index,) = front["model-index"]
    (result,) = index["results"]
    assert result["dataset"] == {
        "type": "nyu-mll/glue",
        "name": "GLUE sst2",
        "config": "sst2",
        "split": "validation",
    }
    assert result["metrics"] == [{"type": "accuracy", "name": "Accuracy", "value": 90.0}]


def test_the_hub_library_reads_the_card(written: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(written / "README.md")
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_config) == ("accuracy", 90.0, "sst2")
    assert card.data.base_model == "someone/bert-base-sst2"


def test_the_card_says_how_to_load_and_reveals_no_folders(written: Path) -> None:
    text = (written / "README.md").read_text(encoding="utf-8")
    assert "import mrem_deploy\n" in text
    assert "model = mrem_deploy.load(folder)" in text
    assert "somebody" not in text
    assert "| Data | SST-2 |" in text
    compile(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0], "card", "exec")


def test_local_models_claim_no_hub_repository(tmp_path: Path) -> None:
    write(tmp_path, metrics(model="/home/somebody/models/my_bert/"))
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "base_model" not in front_matter(tmp_path)
    assert "# my_bert, 4-4-8 bits" in text
    assert "somebody" not in text


def test_an_existing_relative_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert summary.hub_id("models/bert") is None
    assert summary.hub_id("models/other") == "models/other"
    assert summary.hub_id("../bert") is None
    assert summary.hub_id("C:\\bert") is None


def test_licence_and_base_come_from_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"license": "apache-2.0", "_name_or_path": "google/original"}')
    write(tmp_path, metrics(model="/somewhere/fine-tuned"))
    front = front_matter(tmp_path)
    assert (front["license"], front["base_model"]) == ("apache-2.0", "google/original")
    assert front["base_model_relation"] == "finetune"  # the folder itself was made from it
    (tmp_path / "config.json").write_text("{broken")
    write(tmp_path, metrics(model="/x/y", license="mit", base_model="a/b"))
    front = front_matter(tmp_path)
    assert (front["license"], front["base_model"]) == ("mit", "a/b")
    assert front["base_model_relation"] == "quantized"


@pytest.mark.parametrize(
    ("description", "shown"),
    [
        ("nyu-mll/glue", "nyu-mll/glue"),
        ("/home/me/data/SST-2; evaluated on ~/dev.tsv", "SST-2; evaluated on dev.tsv"),
        ("../data/reviews.csv (a fixed random fifth)", "reviews.csv (a fixed random fifth)"),
        (r"C:\Users\me\reviews.csv", "reviews.csv"),
        ("one and/or two", "one and/or two"),
        ("", "—"),
    ],
)
def test_local_paths_are_cut_to_their_last_part(description: str, shown: str) -> None:
    assert summary.data_words(description) == shown


# Words and numbers


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (42.4, "42 s"),
        (90, "1.5 min"),
        (5400, "1.5 h"),
        (None, "—"),
        (math.nan, "—"),
    ],
)
def test_duration(seconds: float | None, shown: str) -> None:
    assert format.duration(seconds) == shown


def test_bits_in_words() -> None:
    assert summary.bits_words("2-32-4") == "2-bit weights, word embeddings unquantized, 4-bit activations"
    assert summary.bits_words("auto-4") == "bits chosen layer by layer, 4-bit activations"


@pytest.mark.parametrize(
    ("mebibytes", "shown"),
    [(512.4, "512 MiB"), (1536.0, "1.5 GiB"), (0.0, "not measured"), (math.nan, "not measured")],
)
def test_memory(mebibytes: float, shown: str) -> None:
    assert format.memory(mebibytes) == shown


def test_the_card_says_which_model_was_scored(tmp_path: Path) -> None:
    onnx = Onnx("model.onnx", "ort-cpu", 21, 60.0)
    for given, said in (
        (metrics(), "`mrem_deploy.load` returns exactly the model that is evaluated below."),
        (metrics(onnx=onnx), "`mrem_deploy.load` returns exactly the model that is evaluated below."),
        (metrics(onnx=onnx, accuracy=fidelity()), "those of `model.onnx` in onnxruntime;"),
    ):
        write(tmp_path, given)
        assert said in (tmp_path / "README.md").read_text(encoding="utf-8")


# The terminal


def test_the_terminal_gets_a_few_lines() -> None:
    checked = OnnxCheck("1.24.1", 89.5, 2.5, 99.25, 98.0, 24, 6, ("CPUExecutionProvider",))
    onnx = Onnx("model.onnx", "ort-cpu", 21, 60.0, check=checked)
    assert summary.terminal_summary(metrics(onnx=onnx), Path("out")).splitlines() == [
        "accuracy: 92.00 full precision → 90.00 at 4-4-8 (-2.00)",
        "size: 400.0 → 50.0 MiB",
        "onnx: model.onnx, 60.0 MiB, profile ort-cpu; accuracy 89.50, 99.25% agreement with torch, "
        "24 of 30 matmuls on integers",
        "time: 2.5 min training, 5.0 min in total; peak memory 2.0 GiB",
        f"report: {Path('out') / 'report.html'}",
    ]
    sampled = replace(onnx, check=replace(checked, torch_examples=512))
    told = metrics(onnx=sampled, accuracy=fidelity())
    lines = summary.terminal_summary(told, Path("out")).splitlines()
    assert lines[1] == "against full precision: 3.10% ± 0.59 flips, KL 0.0412 ± 0.0031"
    assert "99.25% agreement with torch on 512 examples, 24 of" in lines[3]
    bare = summary.terminal_summary(metrics(onnx=replace(onnx, check=None)), Path("out")).splitlines()
    assert bare[2] == "onnx: model.onnx, 60.0 MiB, profile ort-cpu; not validated"
    assert "onnx" not in summary.terminal_summary(metrics(), Path("out"))


def test_ends_are_means_of_the_first_and_last_tenth() -> None:
    points = finite([[step, float(step + 1)] for step in range(30)])
    assert ends(points) == (2.0, 29.0)  # (1+2+3)/3 and (28+29+30)/3
    assert ends(finite([[0, 5.0], [1, None], [2, -1.0]])) == (5.0, 5.0)


# Writing


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full_disk(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full_disk)
    with pytest.raises(UserError, match="no space left"):
        write(tmp_path, metrics(task="rte"))
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before  # no old file changed, no temporary left


def test_the_card_of_an_embedder(tmp_path: Path) -> None:
    """Tags and uses are those that are true: of files that are there."""
    plain = metrics(task="retrieval")
    write(tmp_path, plain)
    assert front_matter(tmp_path)["pipeline_tag"] == "sentence-similarity"
    assert not {"onnx", "sentence-transformers", "transformers.js"} & set(front_matter(tmp_path)["tags"])
    assert "sentence_transformer(" not in (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model_q4.onnx").write_bytes(b"by mrem quantize --export ort-cpu,web")
    write(tmp_path, metrics(task="retrieval", onnx=Onnx("model_int8.onnx", "int8", 18, 60.0)))
    assert {"onnx", "sentence-transformers", "transformers.js"} <= set(front_matter(tmp_path)["tags"])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert 'sentence_transformer("path/to/this/folder", model_file="model_int8.onnx")' in text
    write(tmp_path, metrics(task="reranking", onnx=Onnx("model.onnx", "ort-cpu", 21, 60.0)))
    assert front_matter(tmp_path)["pipeline_tag"] == "text-ranking"
    assert "cross_encoder(" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_drift_is_on_all_pages(tmp_path: Path) -> None:
    own = Fidelity(flips=3.0, flips_error=0.5, drift=Drift(0.0123, 0.001, 0.005, 0.05, 0.4, 0.5, 2.5, 0.7))
    given = fidelity()
    (split,) = given.splits.values()
    given = replace(given, splits={"dev": replace(split, fidelity={"quantized": own})})
    page = write(tmp_path, metrics(accuracy=given))
    rows = {row[1]: row[3] for row in page.rows if len(row) > 3}
    assert rows["Score drift, mean"] == "0.0123 ± 0.0010"
    assert rows["Score drift, 95%"] == "0.0500"
    assert rows["Cross the threshold 0.5, %"] == "2.50 ± 0.70"
    assert "Score drift" in (tmp_path / "README.md").read_text(encoding="utf-8")
    printed = summary.terminal_summary(metrics(accuracy=given), tmp_path)
    assert (
        "drift: scores move by 0.0123 ± 0.0010 (95% by less than 0.0500), 2.50% ± 0.70 cross 0.5" in printed
    )
