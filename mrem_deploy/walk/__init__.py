"""The stages of a run in order: state, loading, plan, training, publishing. `pipeline.py` calls them."""

from __future__ import annotations
