"""Quantizers, quantized layers, their initial scales, and frozen models."""

from __future__ import annotations
