"""Values of the recipe that have a form of their own: '4-4-8', '3,6,9', '3+3', '8GB', '1h30m'."""

from __future__ import annotations

import re

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.options import bad_value
from mrem_deploy.base.outside import shown
from mrem_deploy.numerics import ACTIVATION_BITS, EMBEDDING_BITS, WEIGHT_BITS

LONGEST = 366 * 24 * 3600.0  # seconds
MOST_DIGITS = 9  # of any whole number; Python refuses to read thousands of them


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def parse_bits(text: str) -> tuple[int, int, int]:
    """'4-4-8' → (4, 4, 8)."""
    allowed = (("weights", WEIGHT_BITS), ("embeddings", EMBEDDING_BITS), ("activations", ACTIVATION_BITS))
    parts = str(text).split("-")
    if len(parts) != 3 or not all(map(_is_number, parts)):
        raise UserError(
            f"--bits must be three numbers W-E-A; got {shown(text)}", "for example --bits 4-4-8 or 2-2-8"
        )
    values = (int(parts[0]), int(parts[1]), int(parts[2]))
    for value, (what, choices) in zip(values, allowed, strict=True):
        if value not in choices:
            listed = ", ".join(str(choice) for choice in choices)
            raise UserError(
                f"{value} bits for {what} are not supported", f"choose one of {listed} (32: full precision)"
            )
    return values


def parse_epochs(text: str) -> tuple[float, float]:
    """'3+3' → (3.0, 3.0); 0 leaves a stage out."""
    try:
        first, second = (float(part) for part in str(text).split("+"))
    except ValueError:
        first = second = float("nan")
    if not (0 <= first < 1000 and 0 <= second < 1000 and first + second > 0):
        raise bad_value("qat_epochs", "epochs of both stages, such as 3+3 or 0.5+1", text)
    return first, second


def parse_modules(text: str) -> int | list[int]:
    """'4' → 4 modules; '3,6,9' → modules that begin at blocks 0, 3, 6 and 9."""
    parts = [part for part in str(text).strip("[]").replace(" ", "").split(",") if part]
    if not parts or not all(map(_is_number, parts)) or parts == ["0"]:
        raise UserError(
            f"--modules must be a count or cut points; got {shown(text)}", "for example --modules 4 or 3,6,9"
        )
    return [int(part) for part in parts] if "," in str(text) else int(parts[0])


def module_count(text: str) -> int:
    """How many modules `--modules` means."""
    modules = parse_modules(text)
    return modules if isinstance(modules, int) else len(modules) + 1


def parse_hot_rows(text: str) -> int | None:
    """'64' → 64; 'auto' → None: as many as the bits of the embedding call for."""
    if str(text) == "auto":
        return None
    if not _is_number(str(text)):
        raise bad_value("hot_rows", "auto or a number of rows, 0 or more", text)
    return int(text)


def parse_megabytes(text: str) -> float:
    """'8GB' → 8192.0, in MiB."""
    units = {"GB": 1024.0, "MB": 1.0, "G": 1024.0, "M": 1.0}
    upper = str(text).strip().upper()
    unit = next((u for u in units if upper.endswith(u)), None)
    try:
        value = float(upper.removesuffix(unit)) * units[unit] if unit else float("nan")
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise UserError(
            f"--max-memory must be a size such as 8GB or 500MB; got {shown(text)}",
            "give a number and GB or MB",
        )
    return value


def parse_duration(text: str) -> float:
    """'10m', '90s' or '1h30m' → seconds."""
    found = re.fullmatch(
        r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", str(text).strip()
    )
    hours, minutes, seconds = (float(part or 0) for part in (found.groups() if found else ("nan",) * 3))
    total = 3600 * hours + 60 * minutes + seconds
    if found is None or not any(found.groups()) or not total <= LONGEST:
        raise bad_value("time_budget", "a time such as 10m, 90s or 1h30m, of at most a year", text)
    return total
