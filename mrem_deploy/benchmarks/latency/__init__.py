"""`mrem benchmark latency`: exported models against what a user would pick instead."""

from __future__ import annotations
