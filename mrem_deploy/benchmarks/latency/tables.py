"""The tables of the report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mrem_deploy.benchmarks.latency.settings import RaceSettings, Shape
from mrem_deploy.benchmarks.latency.standings import Cell, Served, Standing, running
from mrem_deploy.benchmarks.output import table
from mrem_deploy.benchmarks.timing import Comparison, geometric_mean

Sections = Mapping[str, list[Standing]]  # by device; the first of each is what the others are compared with

MOST_KINDS = 6  # operator kinds named per model; the rest is added up


def tables(sections: Sections, settings: RaceSettings) -> str:
    """For each device: speed, spread and throughput, size and memory, and on request where the time goes."""
    parts = []
    for device, standings in sections.items():
        left = running(standings)
        for threads in thread_counts(left):
            label = f"{device}, {count(threads, 'thread')}"
            parts.append(_speeds(f"{label}: median ms (× faster)", left, threads, settings))
            parts += _beside(label, left, threads, settings)
            parts.append(_spreads(f"{label}: p95 ms · sentences/s", left, threads, settings))
        parts.append(_verdicts(left))
        parts.append(_weights(device, standings))
        if any(standing.weight.by_shape for standing in left):
            parts.append(_memory(left, settings))
        if any(standing.crowds for standing in left):
            parts.append(_crowds(left, settings))
        for threads in dict.fromkeys(served.threads for served in left[0].served):
            parts.append(_served(left, threads))
        if settings.profile_nodes:
            parts += [_nodes(left, shape) for shape in settings.shapes]
    return "\n\n".join(parts)


def _speeds(label: str, standings: Sequence[Standing], threads: int, settings: RaceSettings) -> str:
    rows = []
    for index, standing in enumerate(standings):
        cells = cells_at(standing, threads)
        mean = geometric_mean([cell.faster.ratio for cell in cells])
        rows.append(
            [
                standing.contender.name,
                *(f"{_ms(c.p50_ms)} ({c.faster.ratio:.2f}×)" if index else _ms(c.p50_ms) for c in cells),
                f"{mean:.2f}×" if index else "1×",
            ]
        )
    return table([label, *map(str, settings.shapes), "geometric mean"], rows)


def _beside(label: str, standings: Sequence[Standing], threads: int, settings: RaceSettings) -> list[str]:
    """Our runtime against the same weights in plain onnxruntime."""
    rows = []
    for standing, plain in pairs(standings):
        ratios = against(standing, plain, threads)
        shown = [f"{ratio:.2f}×" for ratio in (*ratios, geometric_mean(ratios))]
        rows.append([standing.contender.name, plain.contender.name, *shown])
    head = [f"{label}: × faster than", "in plain onnxruntime", *map(str, settings.shapes), "geometric mean"]
    return [table(head, rows)] if rows else []


def pairs(standings: Sequence[Standing]) -> list[tuple[Standing, Standing]]:
    """Those of ours in another runtime, each with the one that has its weights in plain onnxruntime."""
    by_name = {standing.contender.name: standing for standing in standings}
    beside = [(standing, by_name.get(standing.contender.beside or "")) for standing in standings]
    return [(standing, plain) for standing, plain in beside if plain is not None]


def _memory(standings: Sequence[Standing], settings: RaceSettings) -> str:
    """Resident memory over that of the process without the model: after loading, and the peak by shape."""
    rows = []
    for standing in standings:
        found = standing.weight.by_shape
        if found:
            loaded = statistics.median(memory.loaded_mb for memory in found)
            peaks = [f"{memory.peak_mb:,.0f}" for memory in found]
            rows.append([standing.contender.name, f"{loaded:,.0f}", *peaks])
    head = ["MiB over the bare process", "loaded", *(f"peak at {shape}" for shape in settings.memory_shapes)]
    return table(head, rows)


def _crowds(standings: Sequence[Standing], settings: RaceSettings) -> str:
    """Sentences per second of one session alone, and of all at once with the gain."""
    cases = [(crowd.threads, crowd.shape) for crowd in standings[0].crowds]
    rows = []
    for standing in standings:
        if standing.crowds:
            cells = [
                f"{crowd.alone:,.1f} → {sum(crowd.together):,.1f} ({crowd.gain:.2f}×)"
                for crowd in standing.crowds
            ]
            rows.append([standing.contender.name, *cells])
    head = [f"sentences/s: 1 session → {settings.together} at once (×)"]
    return table([*head, *(f"{shape}, {count(threads, 'thread')} each" for threads, shape in cases)], rows)


def _served(standings: Sequence[Standing], threads: int) -> str:
    """The workload: sentences and real tokens per second, and the speed-up."""
    rows = []
    for index, standing in enumerate(standings):
        found = [served for served in standing.served if served.threads == threads]
        if found:
            rows.append([standing.contender.name, *(_serving(served, index > 0) for served in found)])
    cases = [served.case for served in standings[0].served if served.threads == threads]
    label = (
        f"workload, {count(threads, 'thread')}: sentences/s · real tokens/s (× faster; × ours in onnxruntime)"
    )
    return table([label, *cases], rows)


def _serving(served: Served, with_ratio: bool) -> str:
    shown = f"{served.sentences_per_second:,.1f} · {served.tokens_per_second:,.0f}"
    if not with_ratio:
        return shown
    beside = served.faster_than_beside
    more = "" if beside is None else f"; {beside.ratio:.2f}×"
    return f"{shown} ({served.faster.ratio:.2f}×{more})"


def _spreads(label: str, standings: Sequence[Standing], threads: int, settings: RaceSettings) -> str:
    rows = [
        [
            standing.contender.name,
            *(f"{_ms(c.p95_ms)} · {c.sentences_per_second:,.1f}" for c in cells_at(standing, threads)),
        ]
        for standing in standings
    ]
    return table([label, *map(str, settings.shapes)], rows)


def _weights(device: str, standings: Sequence[Standing]) -> str:
    rows = []
    for standing in standings:
        weight = standing.weight
        measured = ["failed", "–", "–", "–"]
        if standing.failed is None and weight.memory is not None:
            measured = [
                f"{weight.load_seconds:.2f}",
                f"{weight.memory.loaded_mb:,.0f}",
                f"{weight.memory.resident_mb:,.0f}",
                f"{weight.memory.empty_mb:,.0f}",
            ]
        rows.append([standing.contender.name, f"{weight.file_mb:,.1f}", *measured])
    head = [device, "file, MiB", "load, s", "memory loaded, MiB", "after runs, MiB", "of it runtime, MiB"]
    return table(head, rows)


def _nodes(standings: Sequence[Standing], shape: Shape) -> str:
    lines = [f"Share of the time by operator kind, {shape}:"]
    for standing in standings:
        found = next(c.node_shares for c in standing.cells if c.shape == shape and c.node_shares is not None)
        lines.append(f"- {standing.contender.name}: {describe_shares(found)}")
    return "\n".join(lines)


def describe_shares(shares: Mapping[str, float]) -> str:
    """The largest by name, the rest added up."""
    kinds = list(shares.items())
    named = [f"{kind} {share:.0%}" for kind, share in kinds[:MOST_KINDS]]
    rest = sum(share for _, share in kinds[MOST_KINDS:])
    return ", ".join([*named, f"others {rest:.0%}"] if rest else named)


def _verdicts(standings: Sequence[Standing]) -> str:
    """Each of ours at default options against every rival."""
    rivals = [s for s in standings if not s.contender.ours]
    rows = []
    for standing in standings:
        if standing.contender.ours and not standing.contender.tuned:
            found = [against(standing, rival) for rival in rivals]
            rows.append(
                [
                    standing.contender.name,
                    *(f"{geometric_mean(ratios):.2f}× ({min(ratios):.2f}×)" for ratios in found),
                ]
            )
    return table(["times faster: geometric mean (lowest)", *(rival.contender.name for rival in rivals)], rows)


def against(standing: Standing, rival: Standing, threads: int | None = None) -> list[float]:
    """How many times faster, cell by cell: medians of the ratios within a round."""
    return [
        Comparison(base=tuple(own.rounds_ms), other=tuple(other.rounds_ms)).ratio
        for own, other in zip(standing.cells, rival.cells, strict=True)
        if threads in (None, own.threads)
    ]


def thread_counts(standings: Sequence[Standing]) -> list[int]:
    return list(dict.fromkeys(cell.threads for cell in standings[0].cells))


def cells_at(standing: Standing, threads: int) -> list[Cell]:
    return [cell for cell in standing.cells if cell.threads == threads]


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def count(number: int, what: str, several: str | None = None) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {several or what + 's'}"
