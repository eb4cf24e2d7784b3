"""Numbers as people read them. What is missing or not finite reads "—"."""

from __future__ import annotations

import math
import numbers
from typing import TypeGuard

NONE = "—"


def is_number(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def score(value: float | None) -> str:
    return f"{value:.1f}" if is_number(value) else NONE


def signed(value: float) -> str:
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def count(value: float | None) -> str:
    return f"{int(value):,}" if is_number(value) else NONE


def three_digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:#.3g}".rstrip(".") if is_number(value) else NONE


def mib(mebibytes: float | None) -> str:
    """A size."""
    return f"{mebibytes:,.1f} MiB" if is_number(mebibytes) else NONE


def memory(mebibytes: float | None) -> str:
    """A size in memory; 0 means that it could not be measured."""
    if not is_number(mebibytes) or mebibytes <= 0:
        return "not measured"
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:,.0f} MiB"


def duration(seconds: float | None) -> str:
    if not is_number(seconds):
        return NONE
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
