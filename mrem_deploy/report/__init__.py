"""What people read: the report, the model card, plots."""

from __future__ import annotations
