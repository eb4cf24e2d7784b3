"""The settings of the modules behind an encoder, as sentence-transformers writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.outside import shown
from mrem_deploy.models import gate
from mrem_deploy.models.sentence_head import ACTIVATIONS, POOLINGS, Dense, Normalize, Pooling

COPY_AGAIN = gate.COPY_AGAIN
SAVE_AGAIN = "save it once with a current release: SentenceTransformer(FOLDER).save(NEW_FOLDER)"
WIDEST = 1_000_000  # numbers of a vector

Place = Callable[[str], Path | None]  # a file of the model by its name, None if there is none

LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_KEYS = (*LEGACY, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension")


def check_count(content: Mapping[str, Any], key: str, most: int, path: Path) -> None:
    value = content.get(key)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UserError(
            f"{path} sets {key} to {shown(value)}; a whole number from 1 to {most:,} is expected", COPY_AGAIN
        )


def read_pooling(content: Mapping[str, Any], path: Path | None) -> Pooling:
    unknown = [key for key in content if key not in POOLING_KEYS]
    named = content.get("pooling_mode")
    if named is None:
        modes = [mode for key, mode in LEGACY.items() if content.get(key)] or ["mean"]
    else:
        modes = [named] if isinstance(named, str) else named
    if unknown or not isinstance(modes, list) or not modes or not all(mode in POOLINGS for mode in modes):
        what = f"sets {unknown[0]}" if unknown else f"names the pooling {shown(named)}"
        raise UserError(
            f"{path} {what}, which is not known here; known are {', '.join(POOLINGS)}",
            "give a model with one of these poolings",
        )
    include = content.get("include_prompt", True)
    if not isinstance(include, bool):
        raise UserError(f"{path} sets include_prompt to {shown(include)}; true or false", COPY_AGAIN)
    return Pooling(tuple(modes), include)


def _check_place(content: Mapping[str, Any], path: Path | None) -> None:
    """Modules here take and give the sentence vector."""
    for key in ("module_input_name", "module_output_name"):
        if content.get(key) not in (None, "sentence_embedding"):
            raise UserError(
                f"{path} sets {key} to {shown(content[key])}; only sentence_embedding is supported",
                "give a model whose modules work on sentence vectors",
            )


def read_normalize(content: Mapping[str, Any], path: Path | None) -> Normalize:
    _check_place(content, path)
    return Normalize()


def read_dense(
    content: Mapping[str, Any], path: Path | None, inner: str, place: Place, files: dict[str, bytes]
) -> Dense:
    _check_place(content, path)
    activation = content.get("activation_function", "Tanh")
    name = activation.rpartition(".")[2] if isinstance(activation, str) else ""
    if name not in ACTIVATIONS or not (activation == name or activation.startswith("torch.")):
        raise UserError(
            f"{path} names the activation {shown(activation)}; known are {', '.join(ACTIVATIONS)}",
            "give a model with one of these",
        )
    sizes = [content.get(key) for key in ("in_features", "out_features")]
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size <= WIDEST for size in sizes):
        raise UserError(f"{path} sets in_features and out_features to {shown(sizes)}", COPY_AGAIN)
    file = f"{inner}/model.safetensors"
    found = place(file)
    if found is None:
        raise UserError(
            f"there is no {file}, the weights of a Dense module; a pickle is never opened",
            SAVE_AGAIN,
        )
    files[file] = found.read_bytes()
    residual = bool(content.get("use_residual"))
    given, out = sizes
    expected: dict[str, tuple[Any, ...]] = {"linear.weight": (out, given)}
    expected |= {"linear.bias": (out,)} if content.get("bias", True) else {}
    expected |= {"residual.weight": (out, given)} if residual and given != out else {}
    return Dense(_dense_weights(files[file], found, expected), name, residual)


def _dense_weights(data: bytes, path: Path, expected: Mapping[str, Any]) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        weights = {name: value.float().numpy() for name, value in load(data).items()}
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {error}", COPY_AGAIN) from error
    shapes = {name: value.shape for name, value in weights.items()}
    if shapes != expected:
        raise UserError(f"{path} has {shown(shapes)}; its settings call for {shown(expected)}", COPY_AGAIN)
    if not all(np.isfinite(value).all() for value in weights.values()):
        raise UserError(f"{path} has NaN or Inf", COPY_AGAIN)
    return weights
