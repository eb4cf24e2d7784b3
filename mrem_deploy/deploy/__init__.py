"""Exported models in onnxruntime: sessions, what runs on integers, validation."""

from __future__ import annotations
