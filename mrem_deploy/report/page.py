"""The pages a result is shown with: report.html, report.md, README.md (the model card) and plots/*.png.

report.html is one file with everything inside: it fetches nothing, forbids itself to by its content policy,
follows the reader's light or dark setting and prints on white. Every string that came from outside is
escaped at the moment it is set; `modelcard.py` has the numbers and words that all three pages share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mrem_deploy.base.files import atomic_file, write_text
from mrem_deploy.base.format import NONE, count, duration, is_number, mb, memory
from mrem_deploy.base.tables import Table, md, md_table
from mrem_deploy.report.card import model_card
from mrem_deploy.report.html import _html
from mrem_deploy.report.methods import mixed_tables, qat_rows, three_digits
from mrem_deploy.report.plots import FEW_UNITS, Curve, Plot, draw_plots, ends, finite
from mrem_deploy.report.summary import (
    Summary,
    bits_text,
    bits_words,
    data_words,
    model_name,
    summarise,
    words,
)
from mrem_deploy.train import METHODS

_ENVIRONMENT = {
    "cpu": "Processor",
    "cpu_count": "Processors in use",
    "cpu_count_machine": "Processors of the machine",
    "cpu_features": "Instruction sets",
    "ram_mb": "Memory",
    "gpu": "GPU",
    "torch_threads": "Threads of torch",
    "platform": "System",
    "python": "Python",
    "date": "Date",
}
_PLOT_NAMES = ("loss", "ages", "layer_errors", "size")


def write_report(
    folder: Path,
    metrics: Mapping[str, Any],
    curves: Mapping[str, Curve],
    layer_errors: Mapping[str, Any],
    recipe: Mapping[str, Any],
) -> None:
    """Write all pages of a result into `folder`.

    `metrics` is the content of metrics.json; `curves` holds [step, loss] of every trained unit, in order
    from input to output, and is empty where nothing was trained; `layer_errors` the error before and after
    training. What is missing or not finite is shown as such and never stops the report.
    """
    folder = Path(folder)
    summary = summarise(metrics)
    making = [_run_table(metrics), _cost_table(metrics.get("cost") or {})]
    deployed = _onnx_tables(metrics.get("onnx") or {})
    workers = _worker_tables((metrics.get("cost") or {}).get("workers") or [])
    details = [
        *deployed,
        *making,
        *workers,
        *mixed_tables(metrics.get("mixed_precision") or {}),
        *_unit_tables(curves),
        environment_table(metrics.get("environment") or {}),
    ]
    warnings = _warnings(curves, layer_errors)
    size, parallel = metrics.get("size") or {}, metrics.get("parallel")
    plots = draw_plots(curves, layer_errors, size, trained=bool(curves), parallel=parallel)
    settings = yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True).strip()

    for plot in plots:
        with atomic_file(folder / "plots" / f"{plot.name}.png") as temporary:
            temporary.write_bytes(plot.png)
    for name in set(_PLOT_NAMES) - {plot.name for plot in plots}:  # of an earlier result in this folder
        (folder / "plots" / f"{name}.png").unlink(missing_ok=True)
    write_text(folder / "report.md", _markdown(summary, details, warnings, plots, settings))
    write_text(folder / "report.html", _html(summary, details, warnings, plots, settings))
    write_text(
        folder / "README.md", model_card(folder, metrics, summary, making, [plot.name for plot in plots])
    )


def _run_table(metrics: Mapping[str, Any]) -> Table:
    method, bits = str(metrics.get("method") or NONE), bits_text(metrics)
    rows = [
        ("Model", model_name(metrics)),
        ("Task", words(metrics.get("task"))),
        ("Data", data_words(metrics)),
        ("Method", f"{method}: {METHODS[method].title}" if method in METHODS else method),
        ("Bits", f"{bits}: {bits_words(bits)}"),
        ("Calibration texts", count((metrics.get("cost") or {}).get("calibration_samples"))),
        ("Seed", words(metrics.get("seed"))),
        *qat_rows(metrics.get("qat") or {}),
    ]
    return Table("Run", ("", ""), rows)


def _onnx_tables(onnx: Mapping[str, Any]) -> list[Table]:
    """The exported model: what it is, how it answers and what of it runs on integers."""
    if not onnx:
        return []
    rows = [
        ("File", f"{words(onnx.get('file'))}, {mb(onnx.get('size_mb'))}"),
        ("Profile", f"{words(onnx.get('profile'))}, opset {words(onnx.get('opset'))}"),
    ]
    if "metric" in onnx:
        integer, floating = onnx.get("integer_products"), onnx.get("float_products")
        rows += [
            ("Agreement with the model in torch", _two_digits(onnx.get("agreement"))),
            ("Agreement with full precision", _two_digits(onnx.get("agreement_full_precision"))),
            ("Matrix products", f"{count(integer)} run on integers, {count(floating)} in float"),
            ("Execution provider", ", ".join(map(str, onnx.get("providers") or [])) or NONE),
            ("onnxruntime", words(onnx.get("onnxruntime"))),
        ]
    else:
        rows.append(("Validated", "no"))
    return [Table("ONNX model", ("", ""), rows)]


def _two_digits(share: Any) -> str:
    """Finer than a score: of agreement the last tenths are what counts."""
    return f"{share:.2f}%" if is_number(share) else NONE


def _cost_table(cost: Mapping[str, Any]) -> Table:
    total, training = cost.get("total_seconds"), cost.get("train_seconds")
    rows = [
        (str(stage), duration(seconds), _share(seconds, total))
        for stage, seconds in (cost.get("stages") or {}).items()
    ]
    rows.append(("Total time", duration(total), ""))
    rows.append(
        ("of it training, with the caching of its inputs", duration(training), _share(training, total))
    )
    workers = cost.get("workers") or []
    if len(workers) > 1:
        rows += [(words(worker.get("name")), memory(worker.get("peak_memory_mb")), "") for worker in workers]
    rows.append(("Peak memory", memory(cost.get("peak_memory_mb")), ""))
    return Table("Cost", ("", "Used", "Share of time"), rows)


def _worker_tables(workers: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Where the time of workers that trained at the same time went."""
    rows = []
    for worker in workers:
        seconds = worker.get("seconds") or {}
        whole = seconds.get("whole")
        if not seconds:
            continue
        shares = (_share(seconds.get(name), whole) for name in ("computing", "receiving", "waiting"))
        modules = ", ".join(str(module) for module in worker.get("modules") or [])
        times = duration(whole), *shares
        queues = memory(worker.get("queue_mb")) if worker.get("queue_mb") else "none"
        rows.append((words(worker.get("name")), modules, *times, queues))
    if not rows:
        return []
    header = ("Worker", "Modules", "Training", "Computing", "Receiving", "Waiting", "Queues")
    note = "From the end of priming until the worker's own modules were trained."
    return [Table("Workers", header, rows, note)]


def _share(part: Any, whole: Any) -> str:
    if not (is_number(part) and is_number(whole)) or whole <= 0:
        return ""
    share = 100 * part / whole
    return "< 1%" if 0 < share < 1 else f"{share:.0f}%"


def _unit_tables(curves: Mapping[str, Curve]) -> list[Table]:
    rows = []
    for name, curve in curves.items():
        points = finite(curve)
        first, last = ends(points) if len(points) else (math.nan, math.nan)
        rows.append((str(name), count(len(curve)), *map(three_digits, (first, last, last / first))))
    if not rows:
        return []
    header = ("Trained unit", "Logged steps", "Loss at start", "Loss at end", "End / start")
    note = "Start and end are means over the first and the last tenth of the logged steps."
    return [Table("Loss of every unit", header, rows, note, long=len(rows) > FEW_UNITS)]


def environment_table(environment: Mapping[str, Any]) -> Table:
    rows = []
    keys = [key for key in _ENVIRONMENT if key in environment]
    for key in [*keys, *(key for key in environment if key not in _ENVIRONMENT)]:
        value = environment[key]
        if key == "ram_mb":
            text = memory(value)
        elif value is None:
            text = "none" if key == "gpu" else "not installed"
        else:
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else words(value)
        rows.append((_ENVIRONMENT.get(key, str(key)), text or NONE))
    return Table("Environment", ("", ""), rows)


def _warnings(curves: Mapping[str, Curve], errors: Mapping[str, Any]) -> list[str]:
    """What a careful reader would want to be told before trusting the model."""
    broken = [name for name, curve in curves.items() if any(not is_number(point[1]) for point in curve)]
    usable = {name: finite(curve) for name, curve in curves.items()}
    grown = [
        n for n, points in usable.items() if len(points) > 1 and ends(points)[1] > 1.05 * ends(points)[0]
    ]
    triples = zip(*(errors.get(key) or [] for key in ("layers", "before", "after")), strict=False)
    worse = [str(n) for n, old, new in triples if is_number(old) and is_number(new) and new > 1.05 * old]
    found = []
    if broken:
        found.append(
            f"The loss was not finite at some steps of: {_listed(broken)}. Try a lower learning rate."
        )
    if grown:
        found.append(f"The loss ended higher than it began for: {_listed(grown)}. Try a lower learning rate.")
    if worse:
        found.append(f"Training raised the error at: {_listed(worse)}.")
    return found


def _listed(names: Sequence[str], limit: int = 6) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _plain(value: Any) -> Any:
    """What YAML can write: a recipe may hold paths, tuples and numpy's numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


# report.md


def _markdown(
    summary: Summary, details: list[Table], warnings: list[str], plots: list[Plot], settings: str
) -> str:
    tiles = Table(
        "", ("", "", ""), [(tile.label, tile.value, tile.detail) for tile in summary.tiles], text_columns=3
    )
    parts = [f"# {md(summary.title)}", md(summary.sentence), md(summary.verdict)]
    parts += [f"> **Note:** {md(warning)}" for warning in warnings]
    parts += [md_table(tiles), f"## {summary.scores.title}", md_table(summary.scores)]
    for plot in plots:
        parts += [f"## {plot.title}", f"![{plot.title}](plots/{plot.name}.png)", md(plot.caption)]
    for table in details:
        body = md_table(table)
        if table.long:
            body = f"<details><summary>{len(table.rows)} rows</summary>\n\n{body}\n\n</details>"
        parts += [f"## {md(table.title)}", body]
    runs = re.findall(r"`+", settings)
    fence = "`" * max(3, 1 + max(map(len, runs), default=0))
    parts += ["## Recipe", f"{fence}yaml\n{settings}\n{fence}"]
    return "\n\n".join(part for part in parts if part) + "\n"


# report.html
