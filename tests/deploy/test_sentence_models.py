"""`sentence_transformer` and `cross_encoder`: whole runs on tiny models, compared with the library itself."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_embedder import save_embedder, save_reranker, texts, write_json
from tiny_job import POSITIONS, job_in, workshop_in, write_jsonl

import mrem_deploy
from mrem_deploy import benchmark
from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.benchmarks.batches import steadiness
from mrem_deploy.deploy.embedder import Embedder
from mrem_deploy.deploy.reranker import Reranker
from mrem_deploy.models.activation import score_activation
from mrem_deploy.models.sentence_files import SentenceFiles
from mrem_deploy.quant.frozen import load
from mrem_deploy.result.verification import verify

PROMPTS = {"query": "very good ", "passage": "the film "}
# ONNX and torch multiply the same integers; softmax, GELU and LayerNorm round differently, and a code that
# moves by one moves a component of these vectors of length 1 by about a hundredth.
ONE_CODE = 0.05
# The same integers, and float sums over fewer or more padding tokens, all of which add zeros.
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with workshop_in(tmp_path_factory.mktemp("shop")) as root:
        yield root


@pytest.fixture(scope="module")
def embedder_folder(shop: Path) -> Path:
    """The result of an embedder with cls and mean pooling, a Dense module, and prompts."""
    source = save_embedder(
        shop / "embedder", ["cls", "mean"], dense=12, settings={"prompts": PROMPTS, "truncate_dim": 10}
    )
    data = write_jsonl(shop / "sentences.jsonl", [{"text": text} for text in texts(40)])
    options = {"task": "feature-extraction", "model": source, "data": data, "method": "ptq", "bits": "4-4-8"}
    assert job_in(shop, "embedded", export="ort-cpu", steps=None, lr=None, **options).run() == 0
    return shop / "embedded"


@pytest.fixture(scope="module")
def embedder(embedder_folder: Path) -> Embedder:
    return mrem_deploy.sentence_transformer(embedder_folder)


def library_on(folder: Path) -> Any:
    """A real SentenceTransformer or CrossEncoder of the source, whose encoder is our model in torch."""
    library = pytest.importorskip("sentence_transformers", reason="the library to compare with")
    source = json.loads((folder / "metrics.json").read_text())["model"]
    kind = library.CrossEncoder if "scorer" in source else library.SentenceTransformer
    theirs = kind(source, device="cpu")
    theirs[0].model = load(folder).eval()
    return theirs


def test_the_result_has_the_files_of_the_source(embedder_folder: Path, shop: Path) -> None:
    names = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
             "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")  # fmt: skip
    for name in names:
        assert (embedder_folder / name).read_bytes() == (shop / "embedder" / name).read_bytes(), name
    assert all(not check.findings for check in verify(embedder_folder))


def test_the_scores_are_those_of_the_pooled_vectors(embedder_folder: Path, shop: Path) -> None:
    """Full precision's vectors are kept in the cache: their width is that of the Dense module, cut."""
    metrics = mrem_deploy.open_result(embedder_folder).metrics
    assert metrics.accuracy.metric == "cosine"
    from safetensors.numpy import load_file

    kept = [load_file(path) for path in (shop / "cache" / "predictions").glob("*.safetensors")]
    assert (8, 10) in {tuple(values["predictions"].shape) for values in kept}


def test_a_changed_module_is_damage(embedder_folder: Path) -> None:
    path = embedder_folder / "1_Pooling" / "config.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"mean", b"max"))
    try:
        with pytest.raises(UserError, match=r"1_Pooling/config\.json has changed"):
            load(embedder_folder)
        path.unlink()
        assert any("or is gone" in finding for check in verify(embedder_folder) for finding in check.findings)
    finally:
        path.write_bytes(before)


def test_the_library_itself_reads_the_result_in_torch(embedder_folder: Path) -> None:
    """Through the quantizer that `import mrem_deploy` registers."""
    library = pytest.importorskip("sentence_transformers", reason="the library itself")
    came = library.SentenceTransformer(str(embedder_folder), device="cpu").encode(texts(13, seed=5))
    np.testing.assert_array_equal(came, library_on(embedder_folder).encode(texts(13, seed=5)))


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalized": {"normalize_embeddings": True},
    "prompt": {"prompt": "a very "},
    "prompt by name": {"prompt_name": "passage"},
    "small batches": {"batch_size": 3},
    "shorter": {"truncate_dim": 4},
    "binary": {"precision": "ubinary"},
}


@pytest.mark.parametrize("name", CALLS)
def test_encode_as_the_library_does(name: str, embedder: Embedder, embedder_folder: Path) -> None:
    theirs = library_on(embedder_folder)
    sentences = texts(13, seed=5)
    ours, other = embedder.encode(sentences, **CALLS[name]), theirs.encode(sentences, **CALLS[name])
    assert ours.shape == other.shape
    assert ours.dtype == other.dtype
    if name == "binary":
        assert np.unpackbits(ours ^ other).mean() < 0.05  # signs of components near 0
    else:
        np.testing.assert_allclose(ours, other, rtol=0, atol=ONE_CODE)


def test_the_forms_of_the_answer(embedder: Embedder) -> None:
    one, three = embedder.encode("a good film"), embedder.encode(texts(3), convert_to_tensor=True)
    assert isinstance(one, np.ndarray)
    assert one.shape == (10,)
    assert isinstance(three, torch.Tensor)
    assert three.shape == (3, 10)
    listed = embedder.encode(texts(3), convert_to_numpy=False)
    assert isinstance(listed, list)
    assert torch.equal(torch.stack(listed), three)
    assert embedder.encode([]).shape == (0,)
    assert embedder.encode(np.array(["a", "the film"])).shape == (2, 10)
    tokens = embedder.encode(["the film was good", "a"], output_value="token_embeddings")
    assert [len(rows) for rows in tokens] == [6, 3]
    everything = embedder.encode("the film", output_value=None)
    assert {"input_ids", "token_embeddings", "sentence_embedding"} <= everything.keys()
    assert embedder.get_embedding_dimension() == 10
    with embedder.truncate_embeddings(3):
        assert embedder.encode("a").shape == (3,)
        assert embedder.get_embedding_dimension() == 3
    assert embedder.encode(texts(4), precision="int8").dtype == np.int8


def test_queries_and_documents_get_their_prompts(embedder: Embedder) -> None:
    np.testing.assert_array_equal(embedder.encode_query("plot"), embedder.encode("very good plot"))
    # As the library: "document" comes before "passage", and without one it is empty.
    np.testing.assert_array_equal(embedder.encode_document("plot"), embedder.encode("plot"))


def test_a_vector_is_the_same_in_any_batch(embedder: Embedder) -> None:
    sentences = texts(24, seed=9)
    alone = np.stack([embedder.encode(sentence) for sentence in sentences])
    for size in (2, 5, 24):
        np.testing.assert_allclose(embedder.encode(sentences, batch_size=size), alone, rtol=0, atol=ROUNDING)


def test_similarity_as_the_library_has_it(embedder: Embedder, embedder_folder: Path) -> None:
    util = pytest.importorskip("sentence_transformers.util", reason="the library to compare with")
    one, two = embedder.encode(texts(4)), embedder.encode(texts(4, seed=1))
    for name, function in (("cosine", "cos_sim"), ("dot", "dot_score"), ("euclidean", "euclidean_sim"),
                           ("manhattan", "manhattan_sim")):  # fmt: skip
        own = mrem_deploy.sentence_transformer(embedder_folder, similarity_fn_name=name)
        torch.testing.assert_close(own.similarity(one, two), getattr(util, function)(one, two))
        pairwise = getattr(util, f"pairwise_{function}")(one, two)
        torch.testing.assert_close(own.similarity_pairwise(one, list(two)), pairwise)


@pytest.mark.parametrize("method", ["encode", "predict", "rank", "similarity", "similarity_pairwise"])
def test_the_arguments_are_those_of_the_library(method: str) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the library to compare with")
    ours, theirs = (
        (Reranker, library.CrossEncoder)
        if method in ("predict", "rank")
        else (Embedder, library.SentenceTransformer)
    )
    own, other = (inspect.signature(getattr(kind, method)).parameters for kind in (ours, theirs))
    assert list(own) == list(other)
    assert {name: value.default for name, value in own.items()} == {
        name: value.default for name, value in other.items()
    }


WRONG: dict[str, Callable[[Embedder], Any]] = {
    "an unknown prompt": lambda model: model.encode("a", prompt_name="z"),
    "a batch of 0": lambda model: model.encode("a", batch_size=0),
    "a device": lambda model: model.encode("a", device="cuda:1"),
    "a pool": lambda model: model.encode("a", pool={}),
    "an unknown option": lambda model: model.encode("a", frobnicate=1),
    "an unknown precision": lambda model: model.encode("a", precision="int4"),
    "one vector in bytes": lambda model: model.encode("a", precision="int8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call(name: str, embedder: Embedder) -> None:
    with pytest.raises(ValueError):
        WRONG[name](embedder)


def test_a_folder_that_is_none(shop: Path, embedder_folder: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        mrem_deploy.sentence_transformer(shop / "nowhere")
    with pytest.raises(UserError, match=r"model_int8\.onnx.*it has model\.onnx"):
        mrem_deploy.sentence_transformer(embedder_folder, profile="int8")
    with pytest.raises(UserError, match="is a SentenceTransformer, not a CrossEncoder"):
        mrem_deploy.cross_encoder(embedder_folder)


# -- elsewhere ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_folder(shop: Path) -> Path:
    """The result of an embedder whose pooling other libraries have, too: the mean, at length 1."""
    data = write_jsonl(shop / "sentences.jsonl", [{"text": text} for text in texts(40)])
    options = {"task": "feature-extraction", "model": save_embedder(shop / "plain"), "data": data}
    options |= {"method": "ptq", "bits": "4-4-8", "export": "ort-cpu", "steps": None, "lr": None}
    assert job_in(shop, "plainly", **options).run() == 0
    return shop / "plainly"


def test_fastembed_reads_the_folder(plain_folder: Path) -> None:
    """Offline, as docs/embeddings.md says."""
    pytest.importorskip("fastembed", reason="the library that reads the folder")
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="my-embedder",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(url="https://example.invalid"),  # required, and never asked
        dim=16,
        model_file="model.onnx",
    )
    model = TextEmbedding("my-embedder", specific_model_path=str(plain_folder))
    theirs = np.stack(list(model.embed(texts(9), batch_size=4)))
    ours = mrem_deploy.sentence_transformer(plain_folder).encode(texts(9))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDING)


def test_the_benchmark_of_batches(
    plain_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Static scales: our vectors do not move. Those of quantize_dynamic do."""
    argv = ["batches", str(plain_folder), "--quick", "--sentences", "7", "--out", str(tmp_path)]
    assert cli.run(benchmark.main, argv) == 0
    rows = {row["model"]: row for row in json.loads((tmp_path / "batches.json").read_text())["rows"]}
    assert set(rows) == {"ORT fp32", "quantize_dynamic", "quantize_static", "ours 4-4-8"}
    assert rows["ours 4-4-8"]["largest"] < ROUNDING
    assert rows["quantize_dynamic"]["largest"] > 100 * ROUNDING
    assert "sentences that move" in capfd.readouterr().out
    assert (tmp_path / "batches.png").exists()


def test_a_vector_that_moves_by_hand() -> None:
    """Sentence 1 has another vector in a batch than alone: (0.6, 0.8) instead of (1, 0)."""

    def vectors(chosen: np.ndarray) -> np.ndarray:
        moved = np.array([[0.0, 2.0], [3.0, 4.0]]) if len(chosen) > 1 else np.array([[0.0, 5.0], [9.0, 0.0]])
        return moved[chosen]

    found = steadiness("x", False, vectors, 2, [np.array([0, 1])])
    assert found.largest == pytest.approx(0.8)
    assert found.distance == pytest.approx(0.4)
    assert found.moved == 50.0
    assert found.each == pytest.approx((0.0, 0.8))


# -- cross-encoders ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reranker_folder(shop: Path) -> Path:
    """The result of a cross-encoder, in the files that release 6 of the library writes."""
    source = save_reranker(shop / "scorer")
    encoder = "sentence_transformers.base.modules.transformer.Transformer"
    write_json(source / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": encoder}])
    write_json(source / "sentence_bert_config.json", {"transformer_task": "sequence-classification"})
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"}
    write_json(source / "config_sentence_transformers.json", {**settings, "prompts": {}})
    pairs = zip(texts(40, seed=3, longest=6), texts(40, seed=4), strict=True)
    data = write_jsonl(
        shop / "pairs.jsonl", [{"query": q, "passage": p, "label": i % 2} for i, (q, p) in enumerate(pairs)]
    )
    options = {"task": "reranking", "model": source, "data": data, "method": "ptq", "bits": "4-4-8"}
    assert job_in(shop, "scored", export="ort-cpu", steps=None, lr=None, **options).run() == 0
    assert (shop / "scored" / "modules.json").read_bytes() == (source / "modules.json").read_bytes()
    return shop / "scored"


@pytest.fixture(scope="module")
def reranker(reranker_folder: Path) -> Reranker:
    return mrem_deploy.cross_encoder(reranker_folder)


def test_predict_as_the_library_does(reranker: Reranker, reranker_folder: Path) -> None:
    theirs = library_on(reranker_folder)
    pairs = list(zip(texts(11, seed=6, longest=5), texts(11, seed=7), strict=True))
    ours = reranker.predict(pairs, batch_size=4)
    np.testing.assert_allclose(ours, theirs.predict(pairs, batch_size=4), rtol=0, atol=ONE_CODE)
    assert (ours > 0).all()
    assert (ours < 1).all()  # the sigmoid
    library = pytest.importorskip("sentence_transformers", reason="the library itself")
    in_torch = library.CrossEncoder(str(reranker_folder), device="cpu").predict(pairs, batch_size=4)
    np.testing.assert_array_equal(in_torch, theirs.predict(pairs, batch_size=4))
    raw = reranker.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    torch.testing.assert_close(torch.sigmoid(raw), torch.from_numpy(ours))


def test_rank(reranker: Reranker) -> None:
    passages = texts(7, seed=8)
    ranked = reranker.rank("good plot", passages, top_k=3, return_documents=True)
    scores = reranker.predict([("good plot", passage) for passage in passages])
    best = np.argsort(-scores)[:3]
    assert [found["corpus_id"] for found in ranked] == best.tolist()
    assert [found["text"] for found in ranked] == [passages[i] for i in best]
    np.testing.assert_allclose([found["score"] for found in ranked], scores[best], rtol=0, atol=ROUNDING)
    assert reranker.rank("good plot", []) == []


def test_one_pair_has_one_score(reranker: Reranker) -> None:
    assert np.ndim(reranker.predict(["good film", "a film"])) == 0
    assert reranker.predict([["good film", "a film"]]).shape == (1,)
    assert reranker.predict([]).shape == (0,)
    assert reranker.max_seq_length == POSITIONS


def test_an_embedder_is_no_reranker(reranker_folder: Path) -> None:
    with pytest.raises(UserError, match="is a CrossEncoder, not a SentenceTransformer"):
        mrem_deploy.sentence_transformer(reranker_folder)


@pytest.mark.parametrize(
    ("config", "settings", "outputs", "expected"),
    [
        ({}, {}, 1, "Sigmoid"),
        ({}, {}, 3, "Identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, 1, "Identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, 1, "Identity"),
        ({}, {"activation": "torch.nn.modules.activation.Tanh"}, 1, "Tanh"),
    ],
)
def test_the_activation_of_scores(
    config: dict[str, Any], settings: dict[str, Any], outputs: int, expected: str
) -> None:
    assert score_activation(config, SentenceFiles(**settings), outputs) == expected
    with pytest.raises(UserError, match=r"os\.system"):
        score_activation({"sbert_ce_default_activation_function": "os.system"}, SentenceFiles(), 1)
