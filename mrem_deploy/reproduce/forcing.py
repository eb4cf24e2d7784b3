"""Teacher forcing in MREM-P: its gain by steps and bits, and its effect on the loss of modules."""

from __future__ import annotations

from collections.abc import Mapping

from mrem_deploy.report.plots import ends, finite
from mrem_deploy.reproduce import claims, experiments, figures, paper
from mrem_deploy.reproduce.claims import Finding
from mrem_deploy.reproduce.layout import (
    Record,
    Shown,
    difference,
    gap_fields,
    number,
    score_fields,
    spread,
    words,
)
from mrem_deploy.reproduce.plan import ExperimentPlan, Subject
from mrem_deploy.reproduce.results import Gap, Results, gap
from mrem_deploy.result import Curve


def teacher_forcing(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = {
        (r.bits, r.steps, r.teacher_forcing > 0): r for r in experiments.teacher_forcing(plan, subject)
    }
    records: list[Record] = []
    gains: dict[tuple[str, int], Gap] = {}
    for bits, steps in dict.fromkeys(key[:2] for key in recipes):
        without, forced = results[recipes[bits, steps, False]], results[recipes[bits, steps, True]]
        gains[bits, steps] = gap(without, forced)
        papers = paper.TEACHER_FORCING.get((bits, steps), {}).get(subject.paper_model)
        quoted = [paper.figure(text) for text in papers] if papers else [None, None]
        records.append(
            {
                "bits": bits,
                "steps": steps,
                **score_fields("without", without.score(), quoted[0]),
                **score_fields("with", forced.score(), quoted[1]),
                **gap_fields("gain", gains[bits, steps]),
                "paper_gain": quoted[1].value - quoted[0].value if quoted[0] and quoted[1] else None,
            }
        )
    columns = [
        words("bits", "Bits"),
        number("steps", "Steps", 0),
        spread("without", "Without"),
        spread("paper_without", "paper", 1),
    ]
    columns += [
        spread("with", "With"),
        spread("paper_with", "paper", 1),
        difference("gain", "Gain"),
        number("paper_gain", "paper"),
    ]
    found = _forcing_findings(gains)
    metric = results[next(iter(recipes.values()))].metric
    return Shown(columns, records, found, [figures.teacher_forcing(records, metric)], text_columns=1)


def _forcing_findings(gains: dict[tuple[str, int], Gap]) -> list[Finding]:
    """It helps; most with few steps; most with few bits."""
    found = [
        claims.above(f"{bits}, {steps:,} steps: teacher forcing helps", gain)
        for (bits, steps), gain in gains.items()
    ]
    widths = list(dict.fromkeys(bits for bits, _ in gains))
    few, many = min(steps for _, steps in gains), max(steps for _, steps in gains)
    for bits in widths:
        if few != many:
            more = gains[bits, few].minus(gains[bits, many])
            found.append(claims.above(f"{bits}: it helps more at {few:,} steps than at {many:,}", more))
    if len(widths) > 1:
        more = gains[widths[-1], few].minus(gains[widths[0], few])
        found.append(claims.above(f"{few:,} steps: it helps more at {widths[-1]} than at {widths[0]}", more))
    return found


def loss_curves(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = {(r.steps, r.teacher_forcing > 0): r for r in experiments.loss_curves(plan, subject)}
    records: list[Record] = []
    drawn: dict[tuple[int, bool], Mapping[str, Curve]] = {}
    for (steps, forcing), recipe in recipes.items():
        run = results[recipe].runs[0]
        drawn[steps, forcing] = run.history.curves
        for module, curve in run.history.curves.items():
            points = finite(curve)
            start, end = ends(points) if len(points) else (None, None)
            case = "with" if forcing else "without"
            records.append({"steps": steps, "module": module, "forcing": case, "start": start, "end": end})
    columns = [
        number("steps", "Steps", 0),
        words("module", "Module"),
        words("forcing", "Teacher forcing"),
        number("start", "Loss at start", 4),
        number("end", "Loss at end", 4),
    ]
    found = []
    for steps in dict.fromkeys(steps for steps, _ in recipes):
        last = {(r["module"], r["forcing"]): r["end"] for r in records if r["steps"] == steps}
        later = list(dict.fromkeys(module for module, _ in last))[
            1:
        ]  # the first gets no input from another module
        lower = sum(last[module, "with"] < last[module, "without"] for module in later)
        ratios = ", ".join(f"{last[module, 'with'] / last[module, 'without']:.3f}" for module in later)
        claim = f"{steps:,} steps: modules after the first end with a lower loss with teacher forcing"
        if later:
            found.append(claims.counted(claim, lower, len(later), f"loss with / without: {ratios}"))
    share = max(recipe.teacher_forcing for recipe in recipes.values())
    plot = figures.loss_curves(drawn, share)
    notes = ["Start and end are means over the first and last tenth of the steps, for the first seed."]
    return Shown(columns, records, found, [plot], notes, text_columns=3)
