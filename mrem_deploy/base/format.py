"""Numbers as people read them."""

from __future__ import annotations

import math
import numbers
from typing import Any, TypeGuard

NONE = "—"


def is_number(value: Any) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def score(value: Any) -> str:
    return f"{value:.1f}" if is_number(value) else NONE


def signed(value: float) -> str:
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def count(value: Any) -> str:
    return f"{int(value):,}" if is_number(value) else NONE


def mb(value: Any) -> str:
    return f"{value:,.1f} MB" if is_number(value) else NONE


def memory(value: Any) -> str:
    if not is_number(value) or value <= 0:
        return "not measured"
    return f"{value / 1024:.1f} GB" if value >= 1024 else f"{value:,.0f} MB"


def duration(seconds: Any) -> str:
    if not is_number(seconds):
        return NONE
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
