"""What sentence-transformers puts behind an encoder: from the hidden states of tokens to sentence vectors.

In numpy, so that a torch model and an ONNX model share it. `sentence_files` reads it from a model's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

TINY = 1e-9  # sentence-transformers': no division by a sentence without tokens
SHORTEST = 1e-12  # torch.nn.functional.normalize's


def _erf_gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return (0.5 * x * (1.0 + erf(x / np.sqrt(2.0)))).astype(x.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return expit(x)


# By the last part of torch's name.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": _erf_gelu,
    "Sigmoid": _sigmoid,
}


# -- pooling: hidden (B, T, H) and mask (B, T) → (B, H) ----------------------------------------------------


def _first(hidden: np.ndarray, mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    return hidden[np.arange(len(hidden)), (mask != 0).argmax(axis=1)]


def _largest(hidden: np.ndarray, mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.where(mask[:, :, None] != 0, hidden, -np.inf).max(axis=1).astype(hidden.dtype)


def _mean(hidden: np.ndarray, mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    return _weighted(hidden, mask)


def _mean_by_root(hidden: np.ndarray, mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    counts = np.maximum(mask.sum(axis=1, keepdims=True), TINY).astype(hidden.dtype)
    return _weighted(hidden, mask) * np.sqrt(counts)


def _mean_by_place(hidden: np.ndarray, mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    return _weighted(hidden, mask * places)


def _last(hidden: np.ndarray, mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    last = mask.shape[1] - 1 - (mask[:, ::-1] != 0).argmax(axis=1)
    chosen = np.where((mask != 0).any(axis=1), last, 0)
    return hidden[np.arange(len(hidden)), chosen] * (mask[np.arange(len(mask)), chosen] != 0)[:, None]


def _weighted(hidden: np.ndarray, weights: np.ndarray) -> np.ndarray:
    weights = weights[:, :, None].astype(hidden.dtype)
    return (hidden * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), hidden.dtype.type(TINY))


# By name, in the order in which sentence-transformers joins them.
POOLINGS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _mean_by_place,
    "lasttoken": _last,
}


@dataclass(frozen=True)
class Pooling:
    """One vector for each sentence; several ways are joined."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True

    def __call__(self, hidden: np.ndarray, mask: np.ndarray, prompt_length: int = 0) -> np.ndarray:
        """`prompt_length`: tokens in front of the sentence that are left out, unless `include_prompt`."""
        begin = (mask != 0).argmax(axis=1)[:, None]  # after padding on the left
        places = np.arange(mask.shape[1])[None] - begin + 1  # counted from 1, the prompt included
        if prompt_length and not self.include_prompt:
            mask = np.where(places <= prompt_length, 0, mask)
        parts = [POOLINGS[mode](hidden, mask, np.maximum(places, 0)) for mode in self.modes]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def width(self, hidden: int) -> int:
        return hidden * len(self.modes)


# -- what may follow: (B, D) → (B, E) ----------------------------------------------------------------------


@dataclass(frozen=True)
class Normalize:
    """Vectors of length 1."""

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        return unit(vectors)

    def width(self, given: int) -> int:
        return given

    def key(self) -> str:
        return "normalize"


@dataclass(frozen=True)
class Dense:
    """A linear layer with an activation, in full precision."""

    weights: Mapping[str, np.ndarray] = field(hash=False)  # linear.weight, linear.bias, residual.weight
    activation: str = "Tanh"
    residual: bool = False

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        result = vectors @ self.weights["linear.weight"].T
        if "linear.bias" in self.weights:
            result = result + self.weights["linear.bias"]
        result = ACTIVATIONS[self.activation](result)
        if not self.residual:
            return result
        own = self.weights.get("residual.weight")
        return result + (vectors if own is None else vectors @ own.T)

    def width(self, given: int) -> int:
        return len(self.weights["linear.weight"])

    def key(self) -> str:
        hasher = hashlib.sha256()
        for name in sorted(self.weights):
            hasher.update(name.encode() + np.ascontiguousarray(self.weights[name]).tobytes())
        return f"dense {self.activation} {self.residual} {hasher.hexdigest()[:16]}"


@dataclass(frozen=True)
class SentenceHead:
    """All modules behind the encoder, in their order."""

    pooling: Pooling = Pooling()
    after: tuple[Normalize | Dense, ...] = ()
    truncate_dim: int | None = None

    def __call__(self, hidden: np.ndarray, mask: np.ndarray, prompt_length: int = 0) -> np.ndarray:
        vectors = self.pooling(hidden, mask, prompt_length)
        for module in self.after:
            vectors = module(vectors)
        return vectors if self.truncate_dim is None else vectors[:, : self.truncate_dim]

    def width(self, hidden: int) -> int:
        """How many numbers a sentence vector has."""
        width = self.pooling.width(hidden)
        for module in self.after:
            width = module.width(width)
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    def key(self) -> str:
        """Names all that decides the vectors."""
        parts = [f"{'+'.join(self.pooling.modes)} {self.pooling.include_prompt}"]
        return "; ".join([*parts, *(module.key() for module in self.after), f"{self.truncate_dim}"])

    def truncated(self, truncate_dim: int | None) -> SentenceHead:
        return replace(self, truncate_dim=truncate_dim)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Every row divided by its length."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(length, np.asarray(SHORTEST, dtype=vectors.dtype))
