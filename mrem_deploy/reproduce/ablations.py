"""The paper's ablations, and that of the default recipe: one factor changes at a time."""

from __future__ import annotations

import numpy as np

from mrem_deploy.base.format import NONE, is_number, three_digits
from mrem_deploy.evaluate.accuracy import FULL_PRECISION
from mrem_deploy.reproduce import claims, experiments, figures, levers, paper
from mrem_deploy.reproduce.layout import (
    NAMES,
    Column,
    Record,
    Shown,
    difference,
    fidelity_columns,
    fidelity_fields,
    gap_fields,
    method,
    number,
    quantity,
    score_columns,
    score_fields,
    scores_of,
    spread,
    words,
)
from mrem_deploy.reproduce.plan import ExperimentPlan, Subject
from mrem_deploy.reproduce.results import Gap, Measured, Results, drop, gap


def rem_vs_mrem(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = experiments.rem_vs_mrem(plan, subject)
    first = results[recipes[0]]
    scores = scores_of(subject, first)
    records: list[Record] = []
    rows: dict[tuple[str, str, bool], Measured] = {}
    for recipe in dict.fromkeys(recipes):
        long = recipe.steps == plan.steps
        found = rows[recipe.bits, recipe.method, long] = results[recipe]
        papers = paper.REM_MREM.get((recipe.bits, recipe.method, long))
        record: Record = {
            "bits": recipe.bits,
            "method": recipe.method,
            "steps": recipe.steps,
            "paper_steps": papers and papers[0],
            "minutes": found.minutes,
            "paper_minutes": papers and papers[1],
            "gigabytes": found.gigabytes,
            "paper_gigabytes": papers and papers[2],
        }
        for score in scores:
            quoted = paper.figure(papers[3:][score.papers]) if papers else None
            record |= score_fields(score.key, found.score(score.split, metric=score.metric), quoted)
        records.append(record)
    columns = [
        words("bits", "Bits"),
        method(),
        number("steps", "Steps", 0),
        number("paper_steps", "paper", 0),
        quantity("minutes", "Time, min"),
        quantity("paper_minutes", "paper"),
        quantity("gigabytes", "Memory, GiB"),
        quantity("paper_gigabytes", "paper"),
        *score_columns(scores),
    ]
    found_here = []
    for bits in dict.fromkeys(recipe.bits for recipe in recipes):
        short, long_rem, mrem = (
            rows.get((bits, *key)) for key in (("rem", False), ("rem", True), ("mrem-s", True))
        )
        if long_rem and mrem:
            claim = f"{bits}: MREM-S scores above REM of as many steps"
            found_here.append(
                claims.above(claim, gap(long_rem, mrem), _papers(bits, "mrem-s", True, "rem", True))
            )
            claim = f"{bits}: MREM-S takes less time than REM of as many steps"
            found_here.append(claims.less(claim, mrem.minutes, long_rem.minutes, "min"))
        if short and long_rem:
            claim = f"{bits}: more steps help REM"
            found_here.append(
                claims.above(claim, gap(short, long_rem), _papers(bits, "rem", True, "rem", False))
            )
    for record in records:
        short_rem = record["method"] == "rem" and record["steps"] != plan.steps
        record["series"] = "REM, fewer steps" if short_rem else NAMES[record["method"]]
    plot = figures.scores("rem-vs-mrem", "REM and MREM-S", records, scores[0], "series")
    return Shown(columns, records, found_here, [plot])


def _papers(bits: str, better: str, long: bool, worse: str, worse_long: bool) -> float | None:
    one, other = paper.REM_MREM.get((bits, better, long)), paper.REM_MREM.get((bits, worse, worse_long))
    return paper.figure(one[3]).value - paper.figure(other[3]).value if one and other else None


def num_modules(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = {int(r.modules): r for r in experiments.num_modules(plan, subject)}
    measured = {count: results[recipe] for count, recipe in recipes.items()}
    fewest, most = min(measured), max(measured)
    records: list[Record] = [
        {
            "modules": count,
            **score_fields("score", found.score(), None),
            **gap_fields("change", gap(measured[fewest], found) if count != fewest else None),
            "gigabytes": found.gigabytes,
            "paper_gigabytes": paper.MODULE_GIGABYTES.get(count),
            "minutes": found.minutes,
        }
        for count, found in measured.items()
    ]
    name = measured[fewest].metric
    columns = [
        number("modules", "Modules", 0),
        spread("score", name.capitalize()),
        difference("change", f"against {fewest} module{'s' if fewest > 1 else ''}"),
        quantity("gigabytes", "Memory, GiB"),
        quantity("paper_gigabytes", "paper"),
        quantity("minutes", "Time, min"),
    ]
    found_here = [
        claims.falling("memory falls with the number of modules", [r["gigabytes"] for r in records], "GiB")
    ]
    if fewest != most:
        claim = f"{fewest} module{'s score' if fewest > 1 else ' scores'} above {most}"
        found_here.insert(0, claims.above(claim, gap(measured[most], measured[fewest])))
    plot = figures.num_modules(records, name, measured[fewest].score(model=FULL_PRECISION).mean)
    notes = ["The paper plots its scores without printing them.", f"All at {plan.lowest()}."]
    return Shown(columns, records, found_here, [plot], notes, text_columns=1)


def calib_size(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = {(r.method, r.calib_size): r for r in experiments.calib_size(plan, subject)}
    measured = {key: results[recipe] for key, recipe in recipes.items()}
    records: list[Record] = []
    for size in plan.calib_sizes:
        record: Record = {"examples": size}
        for name in dict.fromkeys(name for name, _ in measured):
            found = measured[name, size]
            record["used"] = found.examples
            record |= {name: found.score().mean, f"{name}_std": found.score().std}
        if ("rem", size) in measured and ("mrem-s", size) in measured:
            record |= gap_fields("ahead", gap(measured["rem", size], measured["mrem-s", size]))
        records.append(record)
    names = list(dict.fromkeys(name for name, _ in measured))
    columns = [
        number("examples", "Examples", 0),
        number("used", "in the data", 0),
        *(spread(name, NAMES[name]) for name in names),
    ]
    columns.append(difference("ahead", "MREM-S − REM"))
    found_here = []
    few, many = min(plan.calib_sizes), max(plan.calib_sizes)
    if {"rem", "mrem-s"} <= set(names) and few != many:
        behind = gap(measured["mrem-s", few], measured["rem", few])
        found_here.append(claims.above(f"{few:,} examples: REM scores above MREM-S", behind))
        ahead = gap(measured["rem", many], measured["mrem-s", many])
        found_here.append(claims.above(f"{many:,} examples: MREM-S scores above REM", ahead))
    for name in names:
        if few != many:
            claim = f"{NAMES[name]} gains from {few:,} to {many:,} examples"
            found_here.append(claims.above(claim, gap(measured[name, few], measured[name, many])))
    plot = figures.calib_size(records, names, next(iter(measured.values())).metric)
    notes = [
        "The paper plots these curves without printing their numbers; its REM stays at about 60.",
        f"All at {plan.lowest()}.",
    ]
    return Shown(columns, records, found_here, [plot], notes, text_columns=1)


def error_propagation(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = {(r.bits, r.method): r for r in experiments.error_propagation(plan, subject)}
    errors = {key: results[recipe].layer_errors() for key, recipe in recipes.items()}
    records: list[Record] = []
    layers = next(iter(errors.values()))[0]
    for index, layer in enumerate(layers):
        record: Record = {"layer": layer}
        for (bits, name), (_, values) in errors.items():
            own = values[:, index]
            record[f"{name} {bits}"] = float(own.mean())
            record[f"{name} {bits}_std"] = float(own.std(ddof=1)) if len(own) > 1 else None
        records.append(record)
    columns = [
        words("layer", "Layer"),
        *(spread(f"{name} {bits}", f"{NAMES[name]} {bits}", 4) for bits, name in errors),
    ]
    found_here = []
    for bits in dict.fromkeys(bits for bits, _ in errors):
        if (bits, "rem") in errors and (bits, "mrem-s") in errors:
            rem, mrem = (errors[bits, name][1].mean(axis=0) for name in ("rem", "mrem-s"))
            lower = int((mrem < rem).sum())
            claim = f"{bits}: MREM-S has a lower error than REM at every layer"
            ratios = f"MREM-S / REM from {np.min(mrem / rem):.2f} to {np.max(mrem / rem):.2f}"
            found_here.append(claims.counted(claim, lower, len(layers), ratios))
    notes = [
        "‖f̂ − f‖ / ‖f‖ over real tokens of the calibration set, with all earlier layers quantized too. The "
        "paper plots these curves without printing their numbers."
    ]
    plot = figures.error_propagation(records, list(errors))
    return Shown(columns, records, found_here, [plot], notes, text_columns=1)


def per_channel(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = {(r.bits, r.method, r.per_channel): r for r in experiments.per_channel(plan, subject)}
    first = results[next(iter(recipes.values()))]
    scores = scores_of(subject, first)
    records: list[Record] = []
    gains: dict[tuple[str, str], Gap] = {}
    for bits, name in dict.fromkeys(key[:2] for key in recipes):
        plain, channels = (results[recipes[bits, name, yes]] for yes in (False, True))
        gains[bits, name] = gap(plain, channels)
        papers = paper.PER_CHANNEL.get((bits, name))
        record: Record = {"bits": bits, "method": name}
        for score in scores:
            for case, found, place in (("without", plain, 0), ("with", channels, 2)):
                quoted = paper.figure(papers[place + score.papers]) if papers else None
                ours = found.score(score.split, metric=score.metric)
                record |= score_fields(f"{score.key}_{case}", ours, quoted)
        record |= gap_fields("gain", gains[bits, name])
        records.append(record)
    columns = [words("bits", "Bits"), method()]
    for score in scores:
        for case in ("without", "with"):
            key = f"{score.key}_{case}"
            columns += [spread(key, f"{score.header} {case}"), spread(f"paper_{key}", "paper", 1)]
    columns.append(difference("gain", "Gain"))
    found_here = []
    for bits in dict.fromkeys(bits for bits, _ in gains):
        papers = paper.PER_CHANNEL.get((bits, "rem"))
        lift = paper.figure(papers[2]).value - paper.figure(papers[0]).value if papers else None
        if (bits, "rem") in gains:
            found_here.append(claims.above(f"{bits}: per-channel scales help REM", gains[bits, "rem"], lift))
        if (bits, "rem") in gains and (bits, "mrem-s") in gains:
            more = gains[bits, "rem"].minus(gains[bits, "mrem-s"])
            found_here.append(claims.above(f"{bits}: they help REM more than MREM-S", more))
    plot = figures.per_channel(records, scores[0])
    return Shown(columns, records, found_here, [plot])


def ablation(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    """The default recipe, one lever more in every row. See `levers.py`."""
    records: list[Record] = []
    for bits in plan.bits:
        above: Measured | None = None
        for row in levers.rows_at(plan, subject, bits):
            found = results[row.recipe]
            records.append(
                {"bits": bits, "title": row.title, "option": row.lever or None, **_heldout_fields(found)}
                | fidelity_fields(found)
                | {"score": found.score().mean, "score_std": found.score().std}
                | {"full_precision": found.score(model=FULL_PRECISION).mean}
                | gap_fields("drop", drop(found))
                | gap_fields("gain", gap(above, found) if above else None)
                | {"cpu_minutes": found.cpu_minutes, "minutes": found.minutes}
            )
            above = found
    metric = found.metric
    columns = [
        words("bits", "Bits"),
        words("title", "Recipe"),
        Column("Held-out loss by module", _heldout_text),
        *fidelity_columns(records),
        spread("score", metric.capitalize()),
        difference("drop", "− full precision"),
        difference("gain", "− row above"),
        quantity("cpu_minutes", "CPU min"),
        quantity("minutes", "Time, min"),
    ]
    notes = [
        "Held-out loss: the loss that a module trains on, over sentences of the training split that nothing "
        "is trained on, with the quantized modules before it as they are. It needs no labels and varies "
        "least, so trust it before the score.",
        "Flips and KL are against full precision on the evaluation split. CPU min is processor time of "
        "training, unknown where a run was interrupted.",
    ]
    if any(record["option"] == levers.OUTPUT_LOSS for record in records):
        notes.insert(
            1,
            "The row of the output loss changes what the last module's loss is a sum of: compare it within "
            "the rows above that one, or within those from it on.",
        )
    return Shown(columns, records, notes=notes)


def _heldout_fields(found: Measured) -> Record:
    record: Record = {}
    for place, loss in enumerate(found.heldout(), start=1):
        record |= {f"heldout_{place}": loss.mean, f"heldout_{place}_std": loss.std}
    return record


def _heldout_text(record: Record) -> str:
    losses = [value for key, value in record.items() if key.startswith("heldout_") and key[8:].isdecimal()]
    return " ".join(three_digits(loss).lstrip("0") for loss in losses if is_number(loss)) or NONE
