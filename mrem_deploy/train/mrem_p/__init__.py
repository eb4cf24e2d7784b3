"""MREM-P: all modules at once, one worker per module."""

from __future__ import annotations
