"""`mrem_deploy.sentence_transformer(folder)`: a result as sentence-transformers offers it, in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrem_deploy.base.errors import UserError
from mrem_deploy.deploy.text_model import PROFILE, TextModel, Tokens, as_list, check_here
from mrem_deploy.models.sentence_files import EMBEDDER
from mrem_deploy.models.sentence_head import unit

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")
OUTPUTS = ("sentence_embedding", "token_embeddings", None)
PASSAGES = ("document", "passage", "corpus")  # names of the prompt of a document, the first that there is
Embeddings = Any  # arrays and tensors, as sentence-transformers has them


class Embedder(TextModel):
    """`encode` and `similarity` as in sentence-transformers, without it, and without a model in torch."""

    def __init__(
        self,
        folder: str | Path,
        *,
        profile: str = PROFILE,
        model_file: str | None = None,
        threads: int = 0,
        provider: str = "cpu",
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__(
            folder, profile=profile, model_file=model_file, threads=threads, provider=provider,
            prompts=prompts, default_prompt_name=default_prompt_name, kind=EMBEDDER,
        )  # fmt: skip
        names = [entry.name for entry in self._session.get_outputs()]
        if names != ["last_hidden_state"]:
            raise UserError(
                f"{self.folder} holds a model with a head (its outputs are {', '.join(names)}), no embedder",
                "quantize the embedding model with --task feature-extraction or retrieval",
            )
        self.similarity_fn_name = similarity_fn_name or self.files.similarity
        self.truncate_dim = truncate_dim or self.files.head.truncate_dim
        for name in ("query", "document"):
            self.prompts.setdefault(name, "")

    def encode_query(self, inputs: Any, prompt_name: str | None = None, prompt: str | None = None,
                     **options: Any) -> Embeddings:  # fmt: skip
        """`encode` with the prompt "query"."""
        if prompt_name is None and prompt is None and "query" in self.prompts:
            prompt_name = "query"
        return self.encode(inputs, prompt_name, prompt, **options)

    def encode_document(self, inputs: Any, prompt_name: str | None = None, prompt: str | None = None,
                        **options: Any) -> Embeddings:  # fmt: skip
        """`encode` with the prompt "document", "passage" or "corpus", the first that there is."""
        if prompt_name is None and prompt is None:
            prompt_name = next((name for name in PASSAGES if name in self.prompts), None)
        return self.encode(inputs, prompt_name, prompt, **options)

    def encode(
        self,
        inputs: Sequence[str] | str,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: Any = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> Embeddings:
        """The vectors of sentences, with the arguments and results of SentenceTransformer.encode."""
        check_here(device, pool, {name: kwargs[name] for name in kwargs if name != "task"}, "encode")
        if precision not in PRECISIONS or output_value not in OUTPUTS:
            raise ValueError(
                f"precision must be among {PRECISIONS} and output_value among {OUTPUTS}; got {precision!r} "
                f"and {output_value!r}"
            )
        if convert_to_tensor or output_value != "sentence_embedding":
            convert_to_numpy = False
        single = isinstance(inputs, str)
        texts = [inputs] if single else as_list(inputs)
        front = self._prompt(prompt, prompt_name)
        skipped = 0
        if front and not self.files.head.pooling.include_prompt:
            skipped = self._length_of(front)
        head = self.files.head.truncated(truncate_dim if truncate_dim is not None else self.truncate_dim)
        found: list[Any] = [None] * len(texts)
        for places, tokens, outputs in self._outputs(texts, front, batch_size, show_progress_bar, len):
            hidden, mask = outputs[0], tokens["attention_mask"]
            vectors = head(hidden, mask, skipped)
            if normalize_embeddings and output_value == "sentence_embedding":
                vectors = unit(vectors)
            for row, place in enumerate(places):
                found[place] = _entry(output_value, row, tokens, hidden, mask, vectors)
        result = _converted(found, output_value, precision, convert_to_numpy, convert_to_tensor)
        return result[0] if single else result

    def _length_of(self, prompt: str) -> int:
        """Tokens of a prompt, without the special one at the end."""
        ids = self.tokenizer([prompt])["input_ids"][0]
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids)

    def similarity(self, embeddings1: Embeddings, embeddings2: Embeddings) -> torch.Tensor:
        """Of every vector with every other one, (N, M)."""
        return SIMILARITIES[self.similarity_fn_name](_rows(embeddings1), _rows(embeddings2), True)

    def similarity_pairwise(self, embeddings1: Embeddings, embeddings2: Embeddings) -> torch.Tensor:
        """Of every vector with the one at the same place, (N,)."""
        return SIMILARITIES[self.similarity_fn_name](_rows(embeddings1), _rows(embeddings2), False)

    def get_embedding_dimension(self) -> int:
        names = ("hidden_size", "dim", "d_model")  # BERT's, DistilBERT's and T5's
        width = next(int(self._config[name]) for name in names if self._config.get(name))
        return self.files.head.truncated(self.truncate_dim).width(width)

    get_sentence_embedding_dimension = get_embedding_dimension  # its name in earlier releases

    @contextmanager
    def truncate_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Inside, vectors have only their first numbers."""
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_sentence_embeddings = truncate_embeddings


def sentence_transformer(folder: str | Path, **options: Any) -> Embedder:
    """A result of an embedding model, ready to use: `sentence_transformer("result").encode(sentences)`.

    It has the methods of sentence-transformers and runs in onnxruntime alone. Options: profile or model_file
    (which ONNX file), threads, provider, prompts, default_prompt_name, similarity_fn_name, truncate_dim.
    """
    return Embedder(folder, **options)


# -- results -----------------------------------------------------------------------------------------------


def _entry(
    output_value: str | None,
    row: int,
    tokens: Tokens,
    hidden: np.ndarray,
    mask: np.ndarray,
    vectors: np.ndarray,
) -> Any:
    if output_value == "sentence_embedding":
        return vectors[row]
    if output_value == "token_embeddings":
        last = len(mask[row]) - int((mask[row][::-1] != 0).argmax())
        return torch.from_numpy(hidden[row, :last])
    parts = {**tokens, "token_embeddings": hidden, "sentence_embedding": vectors}
    return {name: torch.from_numpy(np.ascontiguousarray(value[row])) for name, value in parts.items()}


def _converted(found: list[Any], output_value: str | None, precision: str, numpy: bool, tensor: bool) -> Any:
    if output_value != "sentence_embedding":
        return found
    if not found:
        return torch.tensor([]) if tensor else np.array([]) if numpy else []
    vectors = narrowed(np.stack(found), precision)
    if tensor:
        return torch.from_numpy(vectors)
    return vectors if numpy else list(torch.from_numpy(vectors))


def narrowed(vectors: np.ndarray, precision: str) -> np.ndarray:
    """Fewer bits per number, as sentence-transformers' `precision` has them."""
    if precision == "float32":
        return vectors
    if precision.endswith("binary"):
        packed = np.packbits(vectors > 0, axis=-1)
        return packed if precision == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
    if len(vectors) < 2:
        raise ValueError(f"precision {precision} takes its range from the vectors: give more than one text")
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    steps = (high - low) / 255
    codes = np.clip(np.floor((vectors - low) / np.where(steps == 0, 1, steps)), 0, 255)
    return codes.astype(np.uint8) if precision == "uint8" else (codes - 128).astype(np.int8)


# -- similarities: (N, D) and (M, D) → (N, M), or (N, D) twice → (N,) --------------------------------------


def _rows(vectors: Embeddings) -> torch.Tensor:
    if isinstance(vectors, list) and vectors:
        stack = torch.stack if isinstance(vectors[0], torch.Tensor) else np.stack
        vectors = stack(vectors)
    tensor = torch.as_tensor(vectors)
    tensor = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    return tensor[None] if tensor.dim() == 1 else tensor


def _dot(a: torch.Tensor, b: torch.Tensor, matrix: bool) -> torch.Tensor:
    return a @ b.T if matrix else (a * b).sum(dim=-1)


def _cosine(a: torch.Tensor, b: torch.Tensor, matrix: bool) -> torch.Tensor:
    one, two = (torch.nn.functional.normalize(rows, p=2, dim=-1) for rows in (a, b))
    return _dot(one, two, matrix)


def _distance(p: float) -> Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]:
    def negative(a: torch.Tensor, b: torch.Tensor, matrix: bool) -> torch.Tensor:
        if matrix:
            return -torch.cdist(a, b, p=p)
        return -torch.linalg.vector_norm(a - b, ord=p, dim=-1)

    return negative


SIMILARITIES: dict[str, Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": _distance(2.0),
    "manhattan": _distance(1.0),
}
