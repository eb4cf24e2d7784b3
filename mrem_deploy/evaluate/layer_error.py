"""How far a quantized model's layers are from the full-precision ones."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from mrem_deploy.base import interrupt
from mrem_deploy.data.encoded import Encoded
from mrem_deploy.models.parts import PartOutput, carve


@torch.no_grad()
def layer_errors(
    teacher: PreTrainedModel, student: PreTrainedModel, encoded: Encoded, batches: list[np.ndarray]
) -> dict[str, float]:
    """‖f̂ − f‖ / ‖f‖ of the embedding output, every block and the output, end to end, over real tokens."""
    count = teacher.config.num_hidden_layers
    full, quantized = carve(teacher, [0, count])[0], carve(student, [0, count])[0]
    device = next(student.parameters()).device
    errors = RelativeErrors()
    for indices in interrupt.steps(batches):
        batch = {name: value.to(device) for name, value in encoded.batch(indices).items()}
        clean, noisy = layers_of(full(None, batch), batch), layers_of(quantized(None, batch), batch)
        for name, reference in clean.items():
            errors.add(name, noisy[name], reference)
    return errors.result()


def layers_of(result: PartOutput, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output of every layer of an entire model, without the padding."""
    assert result.embedding is not None, "only an entire model has all layers"
    mask = batch["attention_mask"].bool()
    named = {"embeddings": result.embedding[mask]}
    named |= {f"block {i}": hidden[mask] for i, hidden in enumerate(result.hidden, start=1)}
    outputs = [value[mask] if result.per_token else value for value in result.outputs]
    return named | {"output": torch.cat([value.flatten() for value in outputs])}


class RelativeErrors:
    """‖f̂ − f‖ / ‖f‖ of named tensors, over all batches that were added."""

    def __init__(self) -> None:
        self._squares: dict[str, np.ndarray] = {}

    def add(self, name: str, value: torch.Tensor, reference: torch.Tensor) -> None:
        error = float((value - reference).double().square().sum())
        size = float(reference.double().square().sum())
        self._squares[name] = self._squares.get(name, np.zeros(2)) + np.array([error, size])

    def result(self) -> dict[str, float]:
        return {name: float(np.sqrt(e / r)) if r > 0 else 0.0 for name, (e, r) in self._squares.items()}
