"""Architectures, their parts, and how checkpoints are loaded."""

from __future__ import annotations
