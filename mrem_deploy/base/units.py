"""Sizes in bytes. Keys and options that end in `_mb` are in MiB."""

from __future__ import annotations

MIB = 2**20
GIB = 2**30
