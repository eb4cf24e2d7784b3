"""The pages of a result: report.html, report.md, README.md (the model card) and plots/*.png.

report.html is one file with everything inside. It fetches nothing, its content policy forbids that, it
follows the reader's light or dark setting and prints on white. Every string from outside is escaped when it
is written. `summary.py` has the numbers and words that all three pages share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrem_deploy.base.files import atomic_file, write_text
from mrem_deploy.base.format import NONE, count, duration, is_number, memory, mib, three_digits
from mrem_deploy.base.tables import Table, md, md_table
from mrem_deploy.base.yaml_text import page_yaml
from mrem_deploy.recipe import Recipe
from mrem_deploy.report.card import model_card
from mrem_deploy.report.heldout import heldout_tables, heldout_warnings
from mrem_deploy.report.html import html_page
from mrem_deploy.report.methods import mixed_tables, qat_rows
from mrem_deploy.report.origin import generated_notes
from mrem_deploy.report.plots import FEW_UNITS, Plot, draw_plots, ends, finite
from mrem_deploy.report.summary import Summary, bits_words, data_words, model_name, summarise, words
from mrem_deploy.report.target import target_tables, target_warnings
from mrem_deploy.result import (
    CARD,
    PLOTS,
    REPORT_HTML,
    REPORT_MD,
    Cost,
    Curve,
    History,
    Metrics,
    Onnx,
    WorkerCost,
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


def write_report(folder: Path, metrics: Metrics, history: History, recipe: Recipe) -> None:
    """Write all pages of a result into `folder`.

    What is missing or not finite is shown as such and never stops the report.
    """
    summary = summarise(metrics)
    making = [_run_table(metrics), _cost_table(metrics.cost)]
    details = [
        *_onnx_tables(metrics.onnx),
        *_runtime_tables(metrics.runtime, metrics.accuracy.metric),
        *making,
        *_worker_tables(metrics.cost.workers),
        *target_tables(metrics.target),
        *mixed_tables(metrics.mixed),
        *_unit_tables(history.curves),
        *heldout_tables(metrics),
        environment_table(metrics.environment),
    ]
    warnings = [
        *generated_notes(metrics.data),
        *target_warnings(metrics.target),
        *_warnings(history),
        *heldout_warnings(metrics),
    ]
    plots = draw_plots(history, metrics.size, metrics.parallel)
    settings = recipe.to_yaml().strip()

    for plot in plots:
        with atomic_file(folder / PLOTS / f"{plot.name}.png") as temporary:
            temporary.write_bytes(plot.png)
    for name in set(_PLOT_NAMES) - {plot.name for plot in plots}:  # of an earlier result in this folder
        (folder / PLOTS / f"{name}.png").unlink(missing_ok=True)
    write_text(
        folder / REPORT_MD, _markdown(summary, details, warnings, plots, page_yaml(recipe.as_dict()).strip())
    )
    write_text(folder / REPORT_HTML, html_page(summary, details, warnings, plots, settings))
    names = [plot.name for plot in plots]
    write_text(folder / CARD, model_card(folder, metrics, summary, making, names))


def _run_table(metrics: Metrics) -> Table:
    method, bits = metrics.method or NONE, metrics.bits or "?"
    rows = [
        ("Model", model_name(metrics.model)),
        ("Task", words(metrics.task)),
        ("Data", data_words(metrics.data)),
        ("Method", f"{method}: {METHODS[method].title}" if method in METHODS else method),
        ("Bits", f"{bits}: {bits_words(bits, metrics.hot_rows)}"),
        ("Calibration texts", count(metrics.cost.calibration_samples)),
        *([("Held-out texts", count(metrics.cost.heldout_samples))] if metrics.cost.heldout_samples else []),
        ("Seed", words(metrics.seed)),
        *qat_rows(metrics.qat),
    ]
    return Table("Run", ("", ""), rows)


def _onnx_tables(onnx: Onnx | None) -> list[Table]:
    """The exported model: what it is, how far it agrees and what of it runs on integers."""
    if onnx is None:
        return []
    rows = [
        ("File", f"{words(onnx.file)}, {mib(onnx.size_mb)}"),
        ("Profile", f"{words(onnx.profile)}, opset {words(onnx.opset)}"),
    ]
    check = onnx.check
    if check is None:
        rows.append(("Validated", "no"))
    else:
        rows += [
            ("Agreement with the model in torch", _two_digits(check.agreement) + _of(check.torch_examples)),
            ("Agreement with full precision", _two_digits(check.agreement_full_precision)),
            ("Matmuls", f"{check.integer_products:,} run on integers, {check.float_products:,} in float"),
            ("Execution provider", ", ".join(check.providers) or NONE),
            ("onnxruntime", words(check.onnxruntime)),
        ]
    return [Table("ONNX model", ("", ""), rows)]


def _runtime_tables(onnx: Onnx | None, metric: str) -> list[Table]:
    """The same model for mrem-runtime, next to plain onnxruntime on the same examples."""
    if onnx is None:
        return []
    rows = [("File", f"{words(onnx.file)}, {mib(onnx.size_mb)}")]
    found = onnx.next_to
    if found is None:
        rows.append(("Run", "no"))
    else:
        rows += [
            ("Runtime", words(found.runtime)),
            ("The same predictions as the file above", _two_digits(found.agreement) + _of(found.examples)),
            (f"{metric} of these examples", f"{found.metric:.2f}"),
            (f"{metric} of the file above", f"{found.onnx_metric:.2f}"),
        ]
    return [Table("ONNX model for mrem-runtime", ("", ""), rows)]


def _of(examples: int | None) -> str:
    return "" if examples is None else f" of {count(examples)} examples"


def _two_digits(share: float) -> str:
    """Finer than a score: the last tenths of an agreement are what counts."""
    return f"{share:.2f}%" if is_number(share) else NONE


def _cost_table(cost: Cost) -> Table:
    total, training = cost.total_seconds, cost.train_seconds
    rows = [(stage, duration(seconds), _share(seconds, total)) for stage, seconds in cost.stages.items()]
    rows.append(("Total time", duration(total), ""))
    rows.append(
        ("of it training, including the cache of its inputs", duration(training), _share(training, total))
    )
    if len(cost.workers) > 1:
        rows += [(words(worker.name), memory(worker.peak_memory_mb), "") for worker in cost.workers]
    rows.append(("Peak memory", memory(cost.peak_memory_mb), ""))
    return Table("Cost", ("", "Used", "Share of time"), rows)


def _worker_tables(workers: Sequence[WorkerCost]) -> list[Table]:
    """Where the time of workers that trained at the same time went."""
    rows = []
    for worker in workers:
        if worker.report is None:
            continue
        seconds = worker.report.seconds
        parts = (seconds.computing, seconds.receiving, seconds.waiting)
        shares = (_share(part, seconds.whole) for part in parts)
        modules = ", ".join(map(str, worker.report.modules))
        queues = memory(worker.report.queue_mb) if worker.report.queue_mb else "none"
        rows.append((words(worker.name), modules, duration(seconds.whole), *shares, queues))
    if not rows:
        return []
    header = ("Worker", "Modules", "Training", "Computing", "Receiving", "Waiting", "Queues")
    note = "From the end of priming until all modules of the worker were trained."
    return [Table("Workers", header, rows, note)]


def _share(part: float | None, whole: float | None) -> str:
    if not (is_number(part) and is_number(whole)) or whole <= 0:
        return ""
    share = 100 * part / whole
    return "< 1%" if 0 < share < 1 else f"{share:.0f}%"


def _unit_tables(curves: Mapping[str, Curve]) -> list[Table]:
    rows = []
    for name, curve in curves.items():
        points = finite(curve)
        first, last = ends(points) if len(points) else (math.nan, math.nan)
        rows.append((name, count(len(curve)), *map(three_digits, (first, last, last / first))))
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


def _warnings(history: History) -> list[str]:
    """What a careful reader would want to know before trusting the model."""
    curves, errors = history.curves, history.layer_errors
    broken = [name for name, curve in curves.items() if any(not is_number(point[1]) for point in curve)]
    usable = {name: finite(curve) for name, curve in curves.items()}
    grown = [
        n for n, points in usable.items() if len(points) > 1 and ends(points)[1] > 1.05 * ends(points)[0]
    ]
    triples = zip(errors.layers, errors.before, errors.after, strict=False)
    worse = [n for n, old, new in triples if is_number(old) and is_number(new) and new > 1.05 * old]
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
