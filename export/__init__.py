"""From a frozen model to ONNX: graph, placement of quantizers, packing, check against ONNX Runtime."""

from __future__ import annotations
