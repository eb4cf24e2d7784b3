"""The report as one HTML page without scripts or links."""

from __future__ import annotations

from html import escape

from mrem_deploy.base.tables import Table
from mrem_deploy.report.plots import Plot
from mrem_deploy.report.summary import Summary


def html_page(
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
    return page_html(
        summary.title,
        f"""<header><div class="eyebrow">Quantization report</div>
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
<footer>All numbers are in <code>metrics.json</code>. Made by mrem_deploy.</footer>""",
    )


def page_html(title: str, main: str, style: str = "") -> str:
    """A page that loads nothing: `main` in the frame and the look that all our pages share."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{CSS}{style}</style>
</head>
<body>
<main>
{main}
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
