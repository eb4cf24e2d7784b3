"""What a result's numbers say, in words and tables, and the model card (README.md) made of them.

`summarise` turns the content of `metrics.json` into plain strings once; `report.py` sets them as HTML and
Markdown, `model_card` as the page the Hugging Face hub shows. Nothing here is escaped: that is the
renderer's duty, at the moment of writing. A number that is missing, None or NaN reads "—".

What a reader would get wrong: the ± of a change. Both models answer the same examples, so where the result
counts the answers that changed, the paired error is used; without the counts, the independent one, which
is larger. Metrics other than accuracy have theirs from a paired bootstrap. `uncertainty.py` has the formulas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrem_deploy.base.format import NONE, count, duration, is_number, mb, memory, score, signed
from mrem_deploy.base.tables import Table
from mrem_deploy.evaluate.uncertainty import accuracy_error, paired_accuracy_error

METRIC_NAMES = {
    "accuracy": "Accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "spearman": "Spearman correlation",
    "pearson": "Pearson correlation",
    "cosine": "Mean cosine agreement",
    "agreement": "Agreement with full precision",
    "exact": "Exact match",
    "best_f1": "F1 at the best threshold",
    "best_exact": "Exact match at the best threshold",
    "sentences": "Sentences all right",
}
_PERCENTAGES = ("accuracy", "f1", "cosine", "agreement", "exact")


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Summary:
    """A result in words."""

    title: str
    sentence: str
    verdict: str
    tiles: list[Tile]
    scores: Table


def summarise(metrics: Mapping[str, Any]) -> Summary:
    """The headline and the scores of a result."""
    cost, size, accuracy = (metrics.get(key) or {} for key in ("cost", "size", "accuracy"))
    model, task, bits = model_name(metrics), words(metrics.get("task")), bits_text(metrics)
    metric = str(accuracy.get("metric") or "score")
    name = METRIC_NAMES.get(metric, metric)
    full, quantized = accuracy.get("full_precision"), accuracy.get("quantized")
    error, examples = headline_error(accuracy)
    smaller, total = times_smaller(size), cost.get("total_seconds")

    reference = f" against {percent(full, metric)} at full precision" if is_number(full) else ""
    told = [f"{name.lower()} {percent(quantized, metric)}{reference}"] if is_number(quantized) else []
    told += [smaller] if smaller != NONE else []
    told += [f"made in {duration(total)}"] if is_number(total) else []
    sentence = (
        f"{model} on {task}, quantized to {bits_words(bits)}" + (": " if told else "") + ", ".join(told) + "."
    )

    before = f"{_change(full, quantized, error)} points from {percent(full, metric)}"
    training = cost.get("train_seconds")
    trained = (
        f"{duration(training)} of it training" if is_number(training) and training > 0 else "nothing trained"
    )
    workers = len(cost.get("workers") or [])
    whose = (
        f"heaviest of {workers} workers" if workers > 1 else str(cost.get("memory_kind") or "of the process")
    )
    tiles = [
        Tile(name, percent(quantized, metric), before if is_number(full) else "with the original model"),
        Tile("Size", smaller, f"{mb(size.get('quantized_mb'))}, was {mb(size.get('full_precision_mb'))}"),
        Tile(
            "Time", duration(total), f"{trained}, {count(cost.get('calibration_samples'))} calibration texts"
        ),
        Tile("Peak memory", memory(cost.get("peak_memory_mb")), whose),
    ]
    verdict = _verdict(full, quantized, error, examples)
    return Summary(f"{model} · {task} · {bits}", sentence, verdict, tiles, _score_table(accuracy))


def change_error(split: Mapping[str, Any]) -> float | None:
    """Standard error of the change in accuracy (or the `paired` metric) of one split, in points, if known."""
    n, metric = split.get("examples"), split.get("paired", "accuracy")
    full, quantized = (_score_of(split.get(key), metric) for key in ("full_precision", "quantized"))
    if not is_number(n) or n <= 0 or full is None or quantized is None:
        return None
    lost, gained = (split.get(key) for key in ("lost", "gained"))
    if is_number(lost) and is_number(gained):
        return paired_accuracy_error(lost, gained, n)
    return math.hypot(accuracy_error(full, n), accuracy_error(quantized, n))


def resampled_error(split: Mapping[str, Any], metric: str) -> float | None:
    """Standard error of the change in any metric of one split, where it was resampled."""
    found = ((split.get("change") or {}).get(metric) or {}).get("standard_error")
    return float(found) if is_number(found) else None


def headline_error(accuracy: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """± of the headline's change and the examples behind it: those of the split the headline quotes,
    or of all of them together where it is their mean."""
    splits, metric = list((accuracy.get("splits") or {}).values()), str(accuracy.get("metric"))
    if not splits:
        return None, None
    if metric != "accuracy":
        error = resampled_error(splits[0], metric)
        return error, None if error is None else int(splits[0]["examples"])
    quoted = [split for split in splits if _score_of(split.get("quantized")) == accuracy.get("quantized")]
    chosen = quoted[:1] or splits
    errors = [change_error(split) for split in chosen]
    known = [error for error in errors if error is not None]
    if len(known) < len(chosen):
        return None, None
    return math.hypot(*known) / len(known), sum(int(split["examples"]) for split in chosen)


def _score_table(accuracy: Mapping[str, Any]) -> Table:
    rows, paired, bounds, resampled = [], False, False, False
    has_onnx = any("onnx" in content for content in (accuracy.get("splits") or {}).values())
    for split, content in (accuracy.get("splits") or {}).items():
        n = content.get("examples")
        full, quantized = content.get("full_precision") or {}, content.get("quantized") or {}
        for metric in dict.fromkeys(name for name in (*full, *quantized) if not name.endswith("_thresh")):
            counted = change_error(content) if metric == content.get("paired", "accuracy") else None
            if counted is not None:
                paired, bounds = paired or is_number(content.get("lost")), True
            own = f" ± {accuracy_error(quantized[metric], n):.1f}" if counted is not None else ""
            error = resampled_error(content, metric) if counted is None else counted
            resampled = resampled or (counted is None and error is not None)
            rows.append(
                (
                    str(split),
                    METRIC_NAMES.get(metric, str(metric)),
                    score(full.get(metric)),
                    score(quantized.get(metric)) + own,
                    *([score((content.get("onnx") or {}).get(metric))] if has_onnx else []),
                    _change(full.get(metric), quantized.get(metric), error),
                    count(n),
                )
            )
    if not rows:
        rows = [("", "", score(accuracy.get("full_precision")), score(accuracy.get("quantized")), NONE, NONE)]
    note = "Scores are in percent, correlations times 100."
    if bounds:
        how = (
            "for the change from the answers that changed"
            if paired
            else "for the change as if the two models had answered different examples, which overstates it"
        )
        note += f" ± is one standard error from sampling the examples (binomial; {how})."
    if resampled:
        note += " Of other metrics the change's ± is a paired bootstrap's standard error."
    if has_onnx:
        note += " ONNX is the exported model in onnxruntime; the change is that of the model in torch."
    column = ("ONNX",) if has_onnx else ()
    header = ("Split", "Metric", "Full precision", "Quantized", *column, "Change", "Examples")
    return Table("Results", header, rows, note, text_columns=2)


def _verdict(full: Any, quantized: Any, error: float | None, examples: int | None) -> str:
    if not error or not (is_number(full) and is_number(quantized)):
        return ""
    change, ratio = quantized - full, abs(quantized - full) / error
    told = f"The change of {signed(change)} points is {ratio:.1f} times its standard error ({error:.1f})"
    if ratio <= 2:
        return f"{told}: {count(examples)} examples cannot tell it from none."
    return f"{told}: more than the sampling of {count(examples)} examples explains."


def _change(full: Any, quantized: Any, error: float | None) -> str:
    if not (is_number(full) and is_number(quantized)):
        return NONE
    text = signed(quantized - full)
    return text if error is None else f"{text} ± {error:.1f}"


def _score_of(scores: Any, metric: str = "accuracy") -> float | None:
    value = scores.get(metric) if isinstance(scores, Mapping) else None
    return float(value) if is_number(value) else None


# Numbers and names as people read them.


def percent(value: Any, metric: str) -> str:
    """Accuracies carry a percent sign; a correlation times 100 is not a percentage of anything."""
    return score(value) + ("%" if metric in _PERCENTAGES and is_number(value) else "")


def times_smaller(size: Mapping[str, Any]) -> str:
    full, quantized = size.get("full_precision_mb"), size.get("quantized_mb")
    if not (is_number(full) and is_number(quantized)) or quantized <= 0:
        return NONE
    return f"{full / quantized:.1f}× smaller"


def bits_text(metrics: Mapping[str, Any]) -> str:
    bits = metrics.get("bits")
    return "-".join(map(str, bits)) if isinstance(bits, (list, tuple)) else str(bits or "?")


def bits_words(bits: str) -> str:
    """ "4-4-8" in words."""
    widths = bits.split("-")
    if widths[0] == "auto":
        return f"bits chosen layer by layer, {widths[1] if len(widths) > 1 else '8'}-bit activations"
    if len(widths) != 3:
        return f"{bits} bits"
    parts = zip(widths, ("weights", "word embeddings", "activations"), strict=True)
    return ", ".join(f"{kind} unquantized" if bit == "32" else f"{bit}-bit {kind}" for bit, kind in parts)


def model_name(metrics: Mapping[str, Any]) -> str:
    """A hub id in full; of a local folder only its own name, which says as much and reveals less."""
    model = metrics.get("model")
    name = str((model.get("name") if isinstance(model, Mapping) else model) or "?")
    return name if hub_id(name) else re.split(r"[/\\]", name.rstrip("/\\"))[-1] or "?"


def hub_id(name: Any) -> str | None:
    """`name` if it can be a repository on the hub, None for local folders."""
    fits = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name)
    return name if fits and not Path(name).exists() else None


def words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words(item)}" for key, item in value.items())
    return NONE if value is None or value == "" else str(value)


def data_words(metrics: Mapping[str, Any]) -> str:
    """The data's description, with local paths cut to their last part: the card is made to be published."""
    return re.sub(
        r"(?<![\w.])(?:~|\.\.?|[A-Za-z]:)?(?:[/\\\\][^\s/\\\\;,]+)*[/\\\\]([^\s/\\\\;,]+)",
        r"\1",
        words(metrics.get("data")),
    )
