"""Tasks and their data: where rows come from, what they hold, how they become tokens."""

from __future__ import annotations
