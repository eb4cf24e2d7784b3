"""The tools under every room: errors, files, progress, the machine."""

from __future__ import annotations
