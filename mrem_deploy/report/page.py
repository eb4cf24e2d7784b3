"""The pages a result is shown with: report.html, report.md, README.md (the model card) and plots/*.png.

report.html is one file with everything inside: it fetches nothing, forbids itself to by its content policy,
follows the reader's light or dark setting and prints on white. Every string that came from outside is
escaped at the moment it is set; `modelcard.py` has the numbers and words that all three pages share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mrem_deploy.base.files import atomic_file, write_text
from mrem_deploy.base.tables import Table, md, md_table
from mrem_deploy.report.methods import mixed_tables, qat_rows, three_digits
from mrem_deploy.report.plots import FEW_UNITS, Curve, Plot, draw_plots, ends, finite
from mrem_deploy.report.summary import (
    NONE,
    Summary,
    bits_text,
    bits_words,
    count,
    data_words,
    duration,
    is_number,
    mb,
    memory,
    model_card,
    model_name,
    summarise,
    words,
)

METHODS = {
    "ptq": "calibration only, nothing trained",
    "rem": "every matrix multiplication trained on its own output, in order",
    "mrem-s": "modules of several layers trained one after another",
    "mrem-p": "modules of several layers trained in parallel",
    "qat": "the whole model trained with quantization in place",
}
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
        ("Method", f"{method}: {METHODS[method]}" if method in METHODS else method),
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


def _html(
    summary: Summary, details: list[Table], warnings: list[str], plots: list[Plot], settings: str
) -> str:
    tiles = "".join(
        f'<div class="tile"><div class="label">{escape(tile.label)}</div>'
        f'<div class="value">{escape(tile.value)}</div><div class="detail">{escape(tile.detail)}</div></div>'
        for tile in summary.tiles
    )
    notes = "".join(f'<p class="warning">{escape(warning)}</p>' for warning in warnings)
    verdict = f'<p class="verdict">{escape(summary.verdict)}</p>' if summary.verdict else ""
    subject, _, bits = summary.title.rpartition(" · ")
    figures = "".join(figure_html(plot) for plot in plots)
    tables = "".join(table_html(table) for table in details)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(summary.title)}</title>
<style>{CSS}</style>
</head>
<body>
<main>
<header><div class="eyebrow">Quantization report</div>
<h1>{escape(subject)} · <span class="whole">{escape(bits)}</span></h1>
<p class="lead">{escape(summary.sentence)}</p></header>
{notes}
<div class="tiles">{tiles}</div>
{verdict}
{table_html(summary.scores)}
{figures}
<div class="details">{tables}
<section><h2>Recipe</h2><pre>{escape(settings)}</pre>
<p class="note">Run it again with <code>python -m mrem_deploy.quantize --config recipe.yaml</code>.</p>
</section>
</div>
<footer>MB and GB are 2²⁰ and 2³⁰ bytes. All numbers are in <code>metrics.json</code>. Made by mrem_deploy.
</footer>
</main>
</body>
</html>
"""


def figure_html(plot: Plot) -> str:
    label = escape(f"{plot.title}. {plot.caption}", quote=True)
    svg = plot.svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return f"<figure>{svg}<figcaption>{escape(plot.caption)}</figcaption></figure>\n"


def table_html(table: Table) -> str:
    kind = "pairs" if len(table.header) == 2 else f"figures words-{table.text_columns}"
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.header) else ""
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    body = f'<div class="scroll"><table class="{kind}">{head}<tbody>{rows}</tbody></table></div>{note}'
    if table.long:
        body = f"<details><summary>{len(table.rows)} rows</summary>{body}</details>"
    return f"<section><h2>{escape(table.title)}</h2>{body}</section>\n"


CSS = """
:root { --paper: #fff; --ink: #1f2933; --soft: #5b6875; --line: #dde3e9; --tile: #f4f7f9; --accent: #0072b2;
  --warn: #8a4b00; --warn-paper: #fff4e2; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e4e9ee; --soft: #9aa7b4;
  --line: #2c343d; --tile: #1c2229; --accent: #56b4e9; --warn: #ffc46b; --warn-paper: #2d2412; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 900px; margin: 0 auto; padding: 40px 24px 56px; }
.eyebrow { color: var(--accent); font-size: 13px; font-weight: 600; letter-spacing: .06em;
  text-transform: uppercase; }
h1 { margin: 4px 0 8px; font-size: 27px; line-height: 1.25; overflow-wrap: anywhere; }
.whole { white-space: nowrap; }
h2 { margin: 0 0 10px; font-size: 17px; }
.lead { margin: 0 0 22px; color: var(--soft); font-size: 16px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; }
.tile { padding: 14px 16px; background: var(--tile); border-radius: 10px;
  border-top: 3px solid var(--accent); }
.label { color: var(--soft); font-size: 13px; font-weight: 600; }
.value { font-size: 24px; font-weight: 650; line-height: 1.3; }
.detail, .note, figcaption, footer { color: var(--soft); font-size: 13px; }
.verdict { margin: 16px 0 0; }
.warning { margin: 0 0 12px; padding: 10px 14px; border-radius: 8px; background: var(--warn-paper);
  color: var(--warn); }
section, figure { margin: 34px 0 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { margin-top: 6px; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px 6px 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
thead th { color: var(--soft); font-size: 13px; font-weight: 600; }
tbody th { font-weight: 400; }
table.figures td, table.figures thead th:not(:first-child) { text-align: right; white-space: nowrap; }
table.words-2 td:nth-child(2), table.words-2 thead th:nth-child(2) { text-align: left; }
table.figures td:last-child, table.figures thead th:last-child { padding-right: 0; }
table.pairs th { width: 32%; color: var(--soft); }
table.pairs td { overflow-wrap: anywhere; }
.note { margin: 8px 0 0; }
pre { margin: 0; padding: 14px 16px; background: var(--tile); border-radius: 10px; overflow-x: auto;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
summary { cursor: pointer; color: var(--accent); }
footer { margin-top: 40px; padding-top: 14px; border-top: 1px solid var(--line); }
@media print { :root { --paper: #fff; --ink: #000; --soft: #444; --line: #ccc; --tile: #f4f7f9;
    --accent: #0072b2; --warn: #8a4b00; --warn-paper: #fff4e2; }
  body { font-size: 12px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; } h1 { font-size: 21px; } .value { font-size: 18px; }
  .tiles { grid-template-columns: repeat(4, 1fr); } figure svg { width: 82%; }
  section, figure { margin-top: 22px; } figure, tr, .tile { break-inside: avoid; } h2 { break-after: avoid; }
  pre { white-space: pre-wrap; } }
"""
