"""torch.onnx.export as every trace here calls it: a plain signature, dynamic axes, quiet."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from mrem_deploy.models.architectures import model_outputs
from mrem_deploy.models.loading import longest_input

INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # in the order of Hugging Face's own ONNX files
EXAMPLE = (2, 7)  # batch and sequence of the example; torch would take sizes of 0 and 1 as constants


def input_names(model: PreTrainedModel) -> tuple[str, ...]:
    """The inputs that a user feeds; token types only if the model has more than one."""
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
    several = getattr(model.config, "type_vocab_size", 0) > 1
    return INPUTS if takes_types and several else INPUTS[:2]


class _PlainOutputs(nn.Module):
    """The model with plain tensors in and out, by position."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        given = (input_ids, attention_mask, token_type_ids)
        return tuple(model_outputs(self.model(**dict(zip(self.names, given, strict=False)))))


def traced(
    model: PreTrainedModel, outputs: Sequence[str] | None = None, opset: int | None = None
) -> torch.onnx.ONNXProgram:
    """The model in ONNX, with dynamic batch and sequence; its outputs are the tensors that a user reads."""
    names = input_names(model)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=longest_input(model))}
    example = tuple(torch.full(EXAMPLE, 1 if name == "attention_mask" else 0) for name in names)
    with quiet_tools(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        program = torch.onnx.export(
            _PlainOutputs(model, names).eval(),
            example,
            dynamo=True,
            opset_version=opset,
            input_names=list(names),
            output_names=list(outputs) if outputs else None,
            dynamic_shapes=(axes,) * len(names),
            verbose=False,
        )
    assert program is not None
    return program


@contextlib.contextmanager
def quiet_tools() -> Iterator[None]:
    """Silence exporters and quantizers, which log at length about optional parts; errors still raise."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
