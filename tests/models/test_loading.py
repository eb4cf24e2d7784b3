"""Loading a checkpoint: what comes back, and one clear refusal for each way it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bert import WORDS, save_tiny_bert
from transformers import RobertaConfig, RobertaModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.models.loading import HEADS, check_max_length, load_model

SEQUENCE = "sequence-classification"


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return save_tiny_bert(tmp_path / "model", num_labels=2)


def refusal(*arguments, **options) -> str:
    """The whole message of the UserError that load_model must raise."""
    with pytest.raises(UserError) as caught:
        load_model(*arguments, **options)
    assert caught.value.remedy, "a refusal must say what to do"
    return str(caught.value)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_returns_the_saved_weights_in_float32_and_evaluation_mode(classifier: Path) -> None:
    edit_weights(classifier, lambda w: w.update({k: v.half() for k, v in w.items()}))
    edit_config(classifier, dtype="float16")
    model, tokenizer = load_model(classifier, SEQUENCE)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    saved = load_file(classifier / "model.safetensors")
    assert torch.equal(model.classifier.weight, saved["classifier.weight"].float())
    assert tokenizer("good film")["input_ids"] == [2, 5 + WORDS.index("good"), 5 + WORDS.index("film"), 3]


@pytest.mark.parametrize(
    ("head", "architecture"),
    [
        (SEQUENCE, "BertForSequenceClassification"),
        ("token-classification", "BertForTokenClassification"),
        ("question-answering", "BertForQuestionAnswering"),
        ("feature-extraction", "BertModel"),
    ],
)
def test_every_head_loads_its_own_checkpoint(tmp_path: Path, head: str, architecture: str) -> None:
    model, _ = load_model(save_tiny_bert(tmp_path, architecture), head)
    assert type(model).__name__ == architecture


@pytest.mark.parametrize("head", [h for h in HEADS if h != "feature-extraction"])
def test_a_missing_head_is_refused_unless_it_will_be_trained(tmp_path: Path, head: str) -> None:
    folder = save_tiny_bert(tmp_path, "BertForMaskedLM")
    message = refusal(folder, head)
    assert "no trained" in message
    assert "mrem_deploy.finetune" in message
    torch.manual_seed(3)
    model, _ = load_model(folder, head, num_labels=3, allow_new_head=True)
    torch.manual_seed(3)
    again, _ = load_model(folder, head, num_labels=3, allow_new_head=True)
    for name, tensor in model.state_dict().items():  # the new head follows the seed
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "DistilBert", "Electra", "MPNet", "ModernBert"])
def test_head_and_body_are_told_apart_in_every_architecture(tmp_path: Path, family: str) -> None:
    import transformers

    save_tiny_bert(tmp_path)  # for its tokenizer; config and weights are replaced
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if family == "DistilBert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}
    configuration = getattr(transformers, f"{family}Config")(vocab_size=40, pad_token_id=1, **sizes)
    getattr(transformers, f"{family}Model")(configuration).save_pretrained(tmp_path)
    assert "no trained" in refusal(tmp_path, SEQUENCE)
    model, _ = load_model(tmp_path, SEQUENCE, num_labels=3, allow_new_head=True)
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, SEQUENCE)[0].num_labels == 3
    bare, _ = load_model(tmp_path, "feature-extraction")
    assert bare(torch.tensor([[2, 3]])).last_hidden_state.shape == (1, 2, 16)
    edit_config(tmp_path, vocab_size=41)
    assert "config.json needs (41, " in refusal(tmp_path, SEQUENCE, allow_new_head=True)


def test_another_number_of_labels_is_refused_unless_it_will_be_trained(classifier: Path) -> None:
    message = refusal(classifier, SEQUENCE, num_labels=3)
    assert "has 2 labels" in message
    assert "3 are needed" in message
    model, _ = load_model(classifier, SEQUENCE, num_labels=3, allow_new_head=True)
    assert model.classifier.weight.shape == (3, 16)
    saved = load_file(classifier / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(model.state_dict()[name], saved[name])


def test_feature_extraction_drops_a_pooler_that_was_never_trained(tmp_path: Path) -> None:
    model, _ = load_model(save_tiny_bert(tmp_path, "BertForMaskedLM"), "feature-extraction")
    assert model.pooler is None
    assert model(torch.tensor([[2, 3]])).last_hidden_state.shape == (1, 2, 16)


def test_a_body_that_does_not_fit_is_refused_even_for_training(classifier: Path) -> None:
    edit_config(classifier, num_hidden_layers=3)
    message = refusal(classifier, SEQUENCE, allow_new_head=True)
    assert "bert.encoder.layer.2." in message
    assert "is missing from the weights" in message
    edit_config(classifier, num_hidden_layers=2, intermediate_size=48)
    message = refusal(classifier, SEQUENCE, allow_new_head=True)
    assert "(32" in message
    assert "(48" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused_with_the_name_of_the_tensor(classifier: Path, value: float) -> None:
    name = "bert.encoder.layer.1.attention.self.query.weight"
    edit_weights(classifier, lambda w: w[name][3].fill_(value))
    assert f"{name} has 16 NaN or Inf among 256" in refusal(classifier, SEQUENCE)


def test_a_pickle_only_checkpoint_is_refused_unopened(classifier: Path) -> None:
    (classifier / "model.safetensors").unlink()
    # Opening this file in any way would fail; the refusal must come first.
    (classifier / "pytorch_model.bin").write_bytes(b"no pickle at all")
    message = refusal(classifier, SEQUENCE)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a b", "x/y/z"])
def test_a_missing_folder(name: str) -> None:
    assert f"There is no model folder {name}" in refusal(name, SEQUENCE)


def test_a_file_instead_of_a_folder(classifier: Path) -> None:
    assert "is a file" in refusal(classifier / "config.json", SEQUENCE)


@pytest.mark.parametrize(
    ("missing", "says"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer*", "no tokenizer")],
)
def test_an_incomplete_folder(classifier: Path, missing: str, says: str) -> None:
    (classifier / "vocab.txt").unlink()
    for path in classifier.glob(missing):
        path.unlink()
    assert says in refusal(classifier, SEQUENCE)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal("nobody/no-such-model", SEQUENCE)
    assert "is not a local folder" in message
    assert "hf download nobody/no-such-model" in message


def test_a_cut_safetensors_file(classifier: Path) -> None:
    path = classifier / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be read" in refusal(classifier, SEQUENCE)


@pytest.mark.parametrize(("file", "says"), [("config.json", "be read"), ("tokenizer.json", "be loaded")])
def test_a_broken_json_file(classifier: Path, file: str, says: str) -> None:
    (classifier / file).write_text("{")
    assert f"cannot {says}" in refusal(classifier, SEQUENCE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 3}, "heads"),
        ({"hidden_act": "hum"}, "hum"),
    ],
)
def test_a_config_that_makes_no_model(classifier: Path, change: dict, says: str) -> None:
    edit_config(classifier, **change)
    assert says in refusal(classifier, SEQUENCE)


def test_an_architecture_unknown_to_transformers(classifier: Path) -> None:
    edit_config(classifier, model_type="abacus")
    assert "abacus" in refusal(classifier, SEQUENCE)


def test_code_in_a_checkpoint_is_never_run(classifier: Path) -> None:
    marker = classifier / "ran"
    (classifier / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit_config(
        classifier,
        model_type="abacus",
        auto_map={"AutoConfig": "own.C", "AutoModelForSequenceClassification": "own.M"},
    )
    assert "its own code" in refusal(classifier, SEQUENCE)
    assert not marker.exists()


def test_a_tokenizer_of_another_model(classifier: Path, tmp_path: Path) -> None:
    small = save_tiny_bert(tmp_path / "small", vocab_size=10)
    assert "has 21 tokens but the model embeds only 10" in refusal(small, SEQUENCE)


def test_more_tokens_than_positions_are_refused(classifier: Path) -> None:
    model, _ = load_model(classifier, SEQUENCE)
    check_max_length(model, 32)
    with pytest.raises(UserError, match="at most 32 tokens"):
        check_max_length(model, 33)
    roberta = RobertaModel(
        RobertaConfig(
            vocab_size=9,
            hidden_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=514,
        )
    )
    check_max_length(roberta, 512)
    with pytest.raises(UserError, match="at most 512 tokens"):
        check_max_length(roberta, 513)


def test_an_unknown_head(classifier: Path) -> None:
    assert "feature-extraction" in refusal(classifier, "regression")
