"""Predictions on the evaluation split, their scores and how sure these are."""

from __future__ import annotations
