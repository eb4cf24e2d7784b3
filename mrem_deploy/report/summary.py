"""A result in words and tables. The report, the model card and the terminal show the same.

Nothing here is escaped: whoever writes a page does that. A number that is missing or NaN reads "—".

Note the ± of a change. Both models predict the same examples, so if the result counts the predictions that
changed, the paired error is used; without the counts, the independent one, which is larger. Metrics other
than accuracy get theirs from a paired bootstrap. `evaluate/uncertainty.py` has the formulas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrem_deploy.base.format import NONE, count, duration, is_number, memory, mib, score, signed, three_digits
from mrem_deploy.base.tables import Table
from mrem_deploy.deploy.own_runtime import NextTo
from mrem_deploy.evaluate.accuracy import (
    BY_ONNXRUNTIME,
    FULL_PRECISION,
    ONNX,
    QUANTIZED,
    TORCH,
    Accuracy,
    SplitScores,
)
from mrem_deploy.evaluate.drift import Drift
from mrem_deploy.evaluate.fidelity import Fidelity
from mrem_deploy.evaluate.metrics import metric_of
from mrem_deploy.evaluate.uncertainty import accuracy_error, paired_accuracy_error
from mrem_deploy.report.origin import generated_notes
from mrem_deploy.result import REPORT_HTML, Metrics, Onnx, Sizes


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


def summarise(metrics: Metrics) -> Summary:
    """The headline and the scores of a result."""
    cost, size, accuracy = metrics.cost, metrics.size, metrics.accuracy
    model, task, bits = model_name(metrics.model), words(metrics.task), metrics.bits or "?"
    metric = accuracy.metric or "score"
    name = metric_of(metric).title
    full, quantized, fidelity = accuracy.full_precision, accuracy.quantized, accuracy.fidelity
    error, examples = headline_error(accuracy)
    smaller, total = times_smaller(size), cost.total_seconds

    reference = f" against {percent(full, metric)} at full precision" if is_number(full) else ""
    facts = [f"{name.lower()} {percent(quantized, metric)}{reference}"] if is_number(quantized) else []
    facts += [f"{fidelity.flips:.1f}% of predictions changed"] if is_number(fidelity.flips) else []
    facts += [smaller] if smaller != NONE else []
    facts += [f"made in {duration(total)}"] if is_number(total) else []
    sentence = f"{model} on {task}, quantized to {bits_words(bits)}"
    sentence += (": " if facts else "") + ", ".join(facts) + "."

    change = f"{_change(full, quantized, error)} points from {percent(full, metric)}"
    training = cost.train_seconds
    trained = f"{duration(training)} of it training" if training > 0 else "nothing trained"
    workers = len(cost.workers)
    whose = f"largest of {workers} workers" if workers > 1 else cost.memory_kind or "of the process"
    tiles = [
        Tile(name, percent(quantized, metric), change if is_number(full) else "with the original model"),
        Tile("Size", smaller, f"{mib(size.quantized_mb)}, was {mib(size.full_precision_mb)}"),
        Tile("Time", duration(total), f"{trained}, {count(cost.calibration_samples)} calibration texts"),
        Tile("Peak memory", memory(cost.peak_memory_mb), whose),
    ]
    verdict = _verdict(full, quantized, error, examples)
    return Summary(f"{model} · {task} · {bits}", sentence, verdict, tiles, _score_table(accuracy))


def terminal_summary(metrics: Metrics, folder: Path) -> str:
    """The few lines that `mrem quantize` prints at the end."""
    accuracy, size, cost = metrics.accuracy, metrics.size, metrics.cost
    change = "" if accuracy.change is None else f" ({accuracy.change:+.2f})"
    training, total = (f"{seconds / 60:.1f} min" for seconds in (cost.train_seconds, cost.total_seconds))
    return "\n".join(
        [
            f"{accuracy.metric}: {_two_digits(accuracy.full_precision)} full precision → "
            f"{_two_digits(accuracy.quantized)} at {metrics.bits}{change}",
            *_against_full_precision(accuracy.fidelity),
            f"size: {size.full_precision_mb:.1f} → {size.quantized_mb:.1f} MiB",
            *([_onnx_line(metrics.onnx, accuracy.metric)] if metrics.onnx else []),
            *([_runtime_line(metrics.runtime, accuracy.metric, folder)] if metrics.runtime else []),
            *([f"target: {metrics.target.sentence()} (estimate)"] if metrics.target else []),
            *([_heldout_line(metrics)] if metrics.heldout else []),
            f"time: {training} training, {total} in total; peak memory {memory(cost.peak_memory_mb)}",
            *(f"note: {note[0].lower()}{note[1:]}" for note in generated_notes(metrics.data)),
            f"report: {folder / REPORT_HTML}",
        ]
    )


def _against_full_precision(fidelity: Fidelity) -> list[str]:
    """What changed; the drift of scores only for a user who gave a threshold."""
    lines = [f"against full precision: {fidelity}"] if str(fidelity) else []
    crossing = fidelity.drift is not None and fidelity.drift.crossed is not None
    return [*lines, *([f"drift: {fidelity.drift}"] if crossing else [])]


def _heldout_line(metrics: Metrics) -> str:
    """Short, to be compared with that of another run."""
    losses = ", ".join(three_digits(module.best) for module in metrics.heldout.values())
    return f"held-out loss by module: {losses}"


def _onnx_line(onnx: Onnx, metric: str) -> str:
    line = f"onnx: {onnx.file}, {mib(onnx.size_mb)}, profile {onnx.profile}"
    if onnx.check is None:
        return f"{line}; not validated"
    check = onnx.check
    where = f" on {count(check.torch_examples)} examples" if check.torch_examples else ""
    return (
        f"{line}; {metric} {check.metric:.2f}, {check.agreement:.2f}% agreement with torch{where}, "
        f"{check.integer_products} of {check.products} matmuls on integers"
    )


def _runtime_line(onnx: Onnx, metric: str, folder: Path) -> str:
    line = f"runtime: {onnx.file}, {mib(onnx.size_mb)}, the same model for mrem-runtime"
    if onnx.next_to is None:
        return f"{line} (mrem validate {folder} --profile {onnx.profile})"
    return f"{line}; {next_to_words(onnx.next_to, metric)}"


def next_to_words(found: NextTo, metric: str) -> str:
    """How the operators of mrem-runtime predict next to plain onnxruntime."""
    return (
        f"on {count(found.examples)} examples {metric} {found.metric:.2f} (plain {found.onnx_metric:.2f}), "
        f"{found.agreement:.2f}% agreement"
    )


def change_error(split: SplitScores) -> float | None:
    """Standard error of the change in accuracy (or the `paired` metric) of one split, in points, if known."""
    full, quantized = (split.score(model, split.paired) for model in (FULL_PRECISION, QUANTIZED))
    n = split.examples
    if n <= 0 or not is_number(full) or not is_number(quantized):
        return None
    if split.lost is not None and split.gained is not None:
        return paired_accuracy_error(split.lost, split.gained, n)
    return math.hypot(accuracy_error(full, n), accuracy_error(quantized, n))


def resampled_error(split: SplitScores, metric: str) -> float | None:
    """Standard error of the change in any metric of one split, if it was resampled."""
    found = split.change.get(metric, {}).get("standard_error")
    return float(found) if is_number(found) else None


def headline_error(accuracy: Accuracy) -> tuple[float | None, int | None]:
    """± of the headline's change and the examples behind it: those of the split the headline quotes,
    or of all of them together if it is their mean."""
    splits = list(accuracy.splits.values())
    if not splits:
        return None, None
    if accuracy.metric != "accuracy":
        error = resampled_error(splits[0], accuracy.metric)
        return error, None if error is None else splits[0].examples
    quoted = [split for split in splits if split.score(QUANTIZED, "accuracy") == accuracy.quantized]
    chosen = quoted[:1] or splits
    errors = [change_error(split) for split in chosen]
    known = [error for error in errors if error is not None]
    if len(known) < len(chosen):
        return None, None
    return math.hypot(*known) / len(known), sum(split.examples for split in chosen)


def _score_table(accuracy: Accuracy) -> Table:
    rows, paired, bounds, resampled = [], False, False, False
    by_onnx = accuracy.scored_by == BY_ONNXRUNTIME
    third = TORCH if by_onnx else ONNX  # the same model in the runtime that does not decide
    both = any(third in split.scores for split in accuracy.splits.values())
    for name, split in accuracy.splits.items():
        full, quantized, other = (split.scores.get(model, {}) for model in (FULL_PRECISION, QUANTIZED, third))
        for metric in dict.fromkeys(m for m in (*full, *quantized) if metric_of(m).shown):
            counted = change_error(split) if metric == split.paired else None
            if counted is not None:
                paired, bounds = paired or split.lost is not None, True
            own = f" ± {accuracy_error(quantized[metric], split.examples):.1f}" if counted is not None else ""
            error = resampled_error(split, metric) if counted is None else counted
            resampled = resampled or (counted is None and error is not None)
            rows.append(
                (
                    name,
                    metric_of(metric).title,
                    score(full.get(metric)),
                    score(quantized.get(metric)) + own,
                    *([score(other.get(metric))] if both else []),
                    _change(full.get(metric), quantized.get(metric), error),
                    count(split.examples),
                )
            )
        compared = [
            split.fidelity.get(model, Fidelity()) for model in (QUANTIZED, *([third] if both else []))
        ]
        rows += [(name, *row, count(split.examples)) for row in _fidelity_rows(compared)]
    if not rows:
        rows = [("", "", score(accuracy.full_precision), score(accuracy.quantized), NONE, NONE)]
    note = "Scores are in percent, correlations times 100."
    if bounds:
        how = (
            "of the change from the predictions that changed"
            if paired
            else "of the change as if the two models had predicted different examples, which overstates it"
        )
        note += f" ± is one standard error from sampling the examples (binomial; {how})."
    if resampled:
        note += " For other metrics the ± of the change is the standard error of a paired bootstrap."
    if any(split.fidelity for split in accuracy.splits.values()):
        note += f" {_FIDELITY_NOTE}"
    if by_onnx:
        note += " Quantized is the exported model in onnxruntime."
        note += " Torch is the same model in torch." if both else ""
    elif both:
        note += " ONNX is the exported model in onnxruntime; the change is that of the model in torch."
    column = ("Torch" if by_onnx else "ONNX",) if both else ()
    header = ("Split", "Metric", "Full precision", "Quantized", *column, "Change", "Examples")
    return Table("Results", header, rows, note, text_columns=2)


_FIDELITY_NOTE = (
    "Flips are predictions that differ from full precision's, in percent; KL is the mean divergence of the "
    "predicted distributions from full precision's, in nats. The drift is |score − full precision's| of what "
    "a program compares with a threshold: the probability of a class, a similarity."
)


_FIDELITY_ROWS = (
    ("Flips", "flips"),
    ("KL", "kl"),
    ("Mean difference", "difference"),
    ("Cosine with full precision's", "cosine"),
    ("First ten the same, %", "overlap"),
    ("Rank correlation", "rank"),
)


def _fidelity_rows(compared: Sequence[Fidelity]) -> list[tuple[str, ...]]:
    """Flips and KL next to the scores: measure, full precision, the models, change."""
    rows = []
    for title, name in _FIDELITY_ROWS:
        values = [(getattr(own, name), getattr(own, f"{name}_error")) for own in compared]
        if any(is_number(value) for value, _ in values):
            shown = [_with_error(value, error) for value, error in values]
            rows.append((title, "", *shown, ""))
    drifts = [own.drift or Drift() for own in compared]
    if any(is_number(own.mean) for own in drifts):
        rows.append(("Score drift, mean", "", *(_with_error(own.mean, own.error) for own in drifts), ""))
        for title, name in (("Score drift, 95%", "p95"), ("Score drift, largest", "largest")):
            rows.append((title, "", *(_with_error(getattr(own, name), None) for own in drifts), ""))
    if any(is_number(own.crossed) for own in drifts):
        crossed = (_with_error(own.crossed, own.crossed_error) for own in drifts)
        rows.append((f"Cross the threshold {drifts[0].threshold:g}, %", "", *crossed, ""))
    return rows


def _with_error(value: float | None, error: float | None) -> str:
    """Three digits, and as many decimals for the error."""
    text = three_digits(value) if is_number(value) else NONE
    if not is_number(error) or text == NONE:
        return text
    decimals = len(text.partition(".")[2])
    return f"{text} ± {three_digits(error) if 'e' in text else f'{error:.{decimals}f}'}"


def _verdict(full: float | None, quantized: float | None, error: float | None, examples: int | None) -> str:
    if not error or not (is_number(full) and is_number(quantized)):
        return ""
    change, ratio = quantized - full, abs(quantized - full) / error
    verdict = f"The change of {signed(change)} points is {ratio:.1f} times its standard error ({error:.1f})"
    if ratio <= 2:
        return f"{verdict}: {count(examples)} examples cannot tell it from none."
    return f"{verdict}: more than the sampling of {count(examples)} examples explains."


def _change(full: float | None, quantized: float | None, error: float | None) -> str:
    if not (is_number(full) and is_number(quantized)):
        return NONE
    text = signed(quantized - full)
    return text if error is None else f"{text} ± {error:.1f}"


# -- numbers and names as people read them -----------------------------------------------------------------


def percent(value: float | None, metric: str) -> str:
    """Accuracies carry a percent sign; a correlation times 100 is not a percentage of anything."""
    return score(value) + ("%" if metric_of(metric).percent and is_number(value) else "")


def _two_digits(value: float | None) -> str:
    return f"{value:.2f}" if is_number(value) else NONE


def times_smaller(size: Sizes) -> str:
    full, quantized = size.full_precision_mb, size.quantized_mb
    if not (is_number(full) and is_number(quantized)) or quantized <= 0:
        return NONE
    return f"{full / quantized:.1f}× smaller"


def bits_words(bits: str, hot_rows: int = 0) -> str:
    """ "4-4-8" in words; `hot_rows` of the word embedding have 8 bits."""
    widths = bits.split("-")
    hot = f" ({hot_rows} rows of them with 8 bits)" if hot_rows else ""
    if widths[0] == "auto":
        activations = widths[1] if len(widths) > 1 else "8"
        also = f", {hot_rows} rows of the word embeddings with 8 bits" if hot_rows else ""
        return f"bits chosen layer by layer{also}, {activations}-bit activations"
    if len(widths) != 3:
        return f"{bits} bits"
    parts = zip(widths, ("weights", f"word embeddings{hot}", "activations"), strict=True)
    return ", ".join(f"{kind} unquantized" if bit == "32" else f"{bit}-bit {kind}" for bit, kind in parts)


def model_name(model: str) -> str:
    """A hub id in full; of a local folder only its name, which says as much and reveals less."""
    return model if hub_id(model) else re.split(r"[/\\]", model.rstrip("/\\"))[-1] or "?"


def hub_id(name: str | None) -> str | None:
    """`name` if it can be a repository on the hub, None for local folders."""
    fits = name and re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name)
    return name if fits and not Path(str(name)).exists() else None


def words(value: object) -> str:
    return NONE if value is None or value == "" else str(value)


def data_words(description: str) -> str:
    """The data's description with local paths cut to their last part: the card is made to be published."""
    return re.sub(
        r"(?<![\w.])(?:~|\.\.?|[A-Za-z]:)?(?:[/\\\\][^\s/\\\\;,]+)*[/\\\\]([^\s/\\\\;,]+)",
        r"\1",
        words(description),
    )
