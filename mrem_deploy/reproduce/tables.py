"""The main table, the four dimensions, and the comparison on GLUE: results next to the paper's numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mrem_deploy.evaluate.accuracy import FULL_PRECISION
from mrem_deploy.finetuning import RECORD
from mrem_deploy.reproduce import claims, experiments, figures, paper
from mrem_deploy.reproduce.claims import Finding
from mrem_deploy.reproduce.layout import (
    NAMES,
    Record,
    Score,
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
from mrem_deploy.reproduce.plan import ExperimentPlan, Subject, name_of
from mrem_deploy.reproduce.results import Measured, Results, drop, gap

COSTS = [
    quantity("minutes", "Time, min"),
    quantity("paper_minutes", "paper"),
    quantity("gigabytes", "Memory, GiB"),
    quantity("paper_gigabytes", "paper"),
    quantity("thousands", "Data, K"),
    quantity("paper_thousands", "paper"),
]


def main(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    measured = {(r.bits, r.method): results[r] for r in experiments.main(plan, subject)}
    first = next(iter(measured.values()))
    scores = scores_of(subject, first)
    records = [full_precision_record(subject, first, scores)]
    records += [_record(subject, bits, name, found, scores) for (bits, name), found in measured.items()]
    columns = [words("bits", "Bits"), method(), *COSTS, *score_columns(scores)]
    columns.append(difference("drop", f"{headline(scores, first).header} − full precision"))
    columns += fidelity_columns(records)
    return Shown(
        columns,
        records,
        main_findings(subject, measured),
        [figures.main(records, scores[0], subject)],
        [_cost_note(first)],
    )


def headline(scores: Sequence[Score], measured: Measured) -> Score:
    """The score that differences are about: the first one of the task's main metric."""
    return next(score for score in scores if score.metric == measured.metric)


def _record(subject: Subject, bits: str, name: str, found: Measured, scores: Sequence[Score]) -> Record:
    papers = paper.MAIN[subject.paper_task][2][subject.paper_model].get((bits, name))
    record: Record = {
        "bits": bits,
        "method": name,
        "minutes": found.minutes,
        "paper_minutes": papers and papers.minutes,
        "gigabytes": found.gigabytes,
        "paper_gigabytes": papers and papers.gigabytes,
        "thousands": found.examples / 1000,
        "paper_thousands": papers and papers.thousands,
    }
    for score in scores:
        record |= score_fields(
            score.key,
            found.score(score.split, metric=score.metric),
            papers.scores[score.papers] if papers else None,
        )
    return record | gap_fields("drop", drop(found)) | fidelity_fields(found)


def full_precision_record(subject: Subject, found: Measured, scores: Sequence[Score]) -> Record:
    """Its cost is that of fine-tuning, known if `mrem finetune` made the model."""
    papers = paper.MAIN[subject.paper_task][2][subject.paper_model][paper.FULL_ROW]
    cost = _finetuning(subject.model)
    record: Record = {
        "bits": "32",
        "method": "full",
        "minutes": cost.minutes,
        "paper_minutes": papers.minutes,
        "gigabytes": cost.gigabytes,
        "paper_gigabytes": papers.gigabytes,
        "thousands": cost.thousands,
        "paper_thousands": papers.thousands,
    }
    for score in scores:
        ours = found.score(score.split, FULL_PRECISION, score.metric)
        record |= score_fields(score.key, ours, papers.scores[score.papers])
    return record | gap_fields("drop", None) | fidelity_fields(None)


@dataclass(frozen=True)
class FinetuningCost:
    """What a model took to fine-tune; None where `mrem finetune` did not record it."""

    minutes: float | None = None
    gigabytes: float | None = None
    thousands: float | None = None  # examples


def _finetuning(model: str) -> FinetuningCost:
    try:
        content = json.loads((Path(model) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return FinetuningCost()
    keys_and_units = (("train_seconds", 60), ("peak_memory_mb", 1024), ("examples", 1000))
    return FinetuningCost(*(content.get(key, 0) / unit or None for key, unit in keys_and_units))


def _cost_note(found: Measured) -> str:
    kind = found.runs[0].metrics.cost.memory_kind
    return (
        f"Time is wall-clock training time on this machine; the paper used V100 GPUs. Memory here: {kind}, "
        "of the entire process with its libraries; the paper's is that of a GPU. MREM-P: of the largest "
        "worker."
    )


# What the paper finds better than what, at equal bits.
_ORDER = (("mrem-s", "rem"), ("mrem-p", "rem"), ("mrem-s", "mrem-p"), ("qat", "mrem-s"))


def main_findings(subject: Subject, measured: dict[tuple[str, str], Measured]) -> list[Finding]:
    table = paper.MAIN[subject.paper_task][2][subject.paper_model]
    main_score = 1 if subject.task.startswith("squad") else 0  # F1 there, matched accuracy of MNLI

    def papers(bits: str, better: str, worse: str) -> float | None:
        if (bits, better) not in table or (bits, worse) not in table:
            return None
        return table[bits, better].scores[main_score].value - table[bits, worse].scores[main_score].value

    found = []
    for bits in dict.fromkeys(bits for bits, _ in measured):
        own = {name: measured[b, name] for b, name in measured if b == bits}
        for better, worse in _ORDER:
            if better in own and worse in own:
                claim = f"{bits}: {NAMES[better]} scores above {NAMES[worse]}"
                found.append(claims.above(claim, gap(own[worse], own[better]), papers(bits, better, worse)))
        for cheap, dear in (("rem", "mrem-s"), ("mrem-s", "qat")):
            if cheap in own and dear in own:
                claim = f"{bits}: {NAMES[cheap]} takes less memory than {NAMES[dear]}"
                found.append(claims.less(claim, own[cheap].gigabytes, own[dear].gigabytes, "GiB"))
        for fast, slow in (("mrem-p", "mrem-s"), ("mrem-s", "qat")):
            if fast in own and slow in own:
                claim = f"{bits}: {NAMES[fast]} takes less time than {NAMES[slow]}"
                found.append(claims.less(claim, own[fast].minutes, own[slow].minutes, "min"))
    return found


def overview(plan: ExperimentPlan, subject: Subject, results: Results) -> Shown:
    recipes = experiments.overview(plan, subject)
    measured = {recipe.method: results[recipe] for recipe in recipes}
    bits, first = recipes[0].bits, next(iter(measured.values()))
    scores = scores_of(subject, first)[:1]
    records = [full_precision_record(subject, first, scores)]
    records += [_record(subject, bits, name, found, scores) for name, found in measured.items()]
    columns = [words("bits", "Bits"), method(), *score_columns(scores), *COSTS]
    return Shown(
        columns, records, [], [figures.overview(records, scores[0], bits)], [_cost_note(first)]
    )  # fmt: skip


def glue(pairs: Sequence[tuple[ExperimentPlan, Subject]], results: Results) -> Shown:
    """One row per method and bits, one column per task, with the paper's other rows between them."""
    tasks = {subject.task: (plan, subject) for plan, subject in pairs}
    measured: dict[tuple[str, str], dict[str, Measured]] = {}
    for task, (plan, subject) in tasks.items():
        for recipe in experiments.glue(plan, subject):
            measured.setdefault((name_of(recipe), recipe.bits), {})[task] = results[recipe]
    any_of = {task: found for row in measured.values() for task, found in row.items()}
    published = {(row.method, row.bits): row for row in paper.GLUE}
    keys = [*published, *(key for key in measured if key not in published)]
    records = [_glue_record(key, published.get(key), measured.get(key, {}), any_of) for key in keys]
    columns = [method(), words("bits", "Bits"), words("post_training", "PTQ")]
    columns += [quantity("megabytes", "Size, MiB"), quantity("paper_megabytes", "paper")]
    for task in tasks:
        columns += [spread(task, task.upper()), spread(f"paper_{task}", "paper", 1)]
    columns += [number("average", "Average", 2), number("paper_average", "paper", 1)]
    note = (
        "Averages are over the tasks shown. Rows without our numbers are quoted from the paper. Sizes are "
        "those of the first task's model."
    )
    plot = figures.glue(records, list(tasks))
    return Shown(columns, records, _glue_findings(measured), [plot], [note], text_columns=3)


def _glue_record(
    key: tuple[str, str], papers: paper.GlueRow | None, ours: dict[str, Measured], any_of: dict[str, Measured]
) -> Record:
    full = key == ("full", "full")
    own = any_of if full else ours
    model = {"model": FULL_PRECISION} if full else {}
    size = next((f.runs[0].metrics.size for f in own.values()), None)
    record: Record = {
        "method": key[0],
        "bits": "32" if full else key[1],
        "post_training": "" if full else "yes" if papers is None or papers.post_training else "no",
        "megabytes": size and (size.full_precision_mb if full else size.quantized_mb),
        "paper_megabytes": papers and papers.megabytes,
    }
    for task in any_of:
        score = own[task].score(**model) if task in own else None
        record |= score_fields(task, score, papers.scores.get(task) if papers else None)
    record["average"] = (
        fmean(own[t].score(**model).mean for t in any_of) if any_of.keys() <= own.keys() else None
    )
    quoted = [papers.scores[t].value for t in any_of if t in papers.scores] if papers else []
    record["paper_average"] = fmean(quoted) if quoted and len(quoted) == len(any_of) else None
    return record


def _glue_findings(measured: dict[tuple[str, str], dict[str, Measured]]) -> list[Finding]:
    """MREM above GOBO at two bits; and how much every row loses against full precision, and how sure."""
    found = []
    gobo = measured.get(("gobo", "2-2-32"), {})
    for name in ("mrem-s", "mrem-p"):
        for task, row in measured.get((name, "2-2-8"), {}).items():
            if task in gobo:
                claim = f"{task}: {NAMES[name]} at 2-2-8 scores above GOBO at 2-2-32"
                found.append(claims.above(claim, gap(gobo[task], row), _ahead_of_gobo(name, task)))
    for (name, bits), tasks in measured.items():
        for task, row in tasks.items():
            claim = f"{task}: full precision scores above {NAMES.get(name, name)} at {bits}"
            papers = next((p for p in paper.GLUE if (p.method, p.bits) == (name, bits)), None)
            lost = None
            if papers and task in papers.scores:
                lost = paper.GLUE[0].scores[task].value - papers.scores[task].value
            found.append(claims.above(claim, gap(row, row, None, "quantized", FULL_PRECISION), lost))
    return found


def _ahead_of_gobo(name: str, task: str) -> float | None:
    rows = {(row.method, row.bits): row.scores.get(task) for row in paper.GLUE}
    ours, theirs = rows[name, "2-2-8"], rows["gobo", "2-2-32"]
    return ours.value - theirs.value if ours and theirs else None
