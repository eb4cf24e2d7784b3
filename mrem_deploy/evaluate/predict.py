"""Predictions of a model over encoded examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from mrem_deploy.base import digests
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_file, cache_folder
from mrem_deploy.base.progress import say, track
from mrem_deploy.data.encoded import Encoded, sorted_batches
from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.models.sentence_head import SentenceHead

# A predictor takes a padded batch and returns the model's outputs. There is one for torch and one for ONNX
# models, so that one loop serves both.
Predictor = Callable[[dict[str, torch.Tensor]], list[np.ndarray]]
PREDICTIONS = "predictions"


def torch_predictor(model: nn.Module) -> Predictor:
    """Logits (or the last hidden state) of a torch model."""
    device = next(model.parameters()).device

    @torch.inference_mode()
    def predict(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
        result = model(**{name: value.to(device) for name, value in batch.items()})
        return [value.float().cpu().numpy() for value in model_outputs(result)]

    return predict


def predict(
    predictor: Predictor,
    encoded: Encoded,
    label: str,
    batch_size: int = 32,
    pooling: SentenceHead | None = None,
) -> list[np.ndarray]:
    """Outputs of every example in the order of `encoded`: one row each, or a list of ragged rows.

    With `pooling` the output is a sentence embedding. Outputs per token have no
    padding.
    """
    rows: list[np.ndarray | None] = [None] * len(encoded)
    for indices in track(sorted_batches(encoded.lengths, batch_size), label):
        batch = encoded.batch(indices)
        outputs = predictor(batch)
        if pooling is not None and outputs[0].ndim != 3:
            raise UserError(
                "the model gives no vectors of tokens, which an embedding is made of",
                "give a model for feature-extraction",
            )
        if pooling is not None:
            values: Sequence[np.ndarray] = list(pooling(outputs[0], batch["attention_mask"].numpy()))
        elif len(outputs) > 1 or outputs[0].ndim == 3:
            stacked = np.stack(outputs, axis=-1) if len(outputs) > 1 else outputs[0]  # (B, T, …)
            values = [row[: encoded.lengths[i]] for row, i in zip(stacked, indices, strict=True)]
        else:
            values = list(outputs[0])
        for i, value in zip(indices, values, strict=True):
            rows[i] = value
    return [row for row in rows if row is not None]


def remember(key: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Predictions kept on disk under `key`, which must contain everything that decides them.

    The full-precision model is scored once per model and data, not once per bit width tried.
    """
    path = cache_folder() / "predictions" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"
    kept = _kept(path)
    if kept is not None:
        return kept
    values = compute()
    tensors = {PREDICTIONS: torch.from_numpy(np.ascontiguousarray(values))}
    try:
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, metadata=digests.sealed_metadata({}, tensors))
    except UserError as error:
        say(f"full-precision predictions are not kept for the next run: {error.problem}")
    return values


def _kept(path: Path) -> np.ndarray | None:
    """Predictions of an earlier run; None if there are none, or if they have changed since."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors, metadata = {PREDICTIONS: file.get_tensor(PREDICTIONS)}, file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    if not digests.has_digests(metadata) or digests.metadata_differences(metadata):
        return None
    return None if digests.tensor_differences(metadata, tensors) else tensors[PREDICTIONS].numpy()
