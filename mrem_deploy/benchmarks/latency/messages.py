"""The JSON messages between `contenders.Worker` and the process of worker.py.

Only the standard library: whatever the worker imports counts as the model's memory.
"""

from __future__ import annotations

from typing import TypedDict


class LoadRequest(TypedDict):
    runtime: str
    path: str
    provider: str
    provider_options: dict[str, str]
    disabled_optimizers: list[str]
    config: dict[str, str]
    threads: int
    profile: str | None  # a folder for the runtime's profile of its operators


class LoadReply(TypedDict):
    load_seconds: float
    empty_mb: float  # with the runtime, before the model
    loaded_mb: float


class FeedReply(TypedDict):
    shapes: list[list[int]]  # of every output
    sample: list[list[float]]  # the beginning of every output
    resident_mb: float


class RunReply(TypedDict):
    seconds: float
    resident_mb: float
    peak_mb: float  # since the model was loaded


class ProfileReply(TypedDict):
    nodes: dict[str, float]  # seconds of one run by operator kind


class Sentences(TypedDict):
    """One batch: the tokens of every sentence without padding, and which part of a pair each belongs to."""

    ids: list[list[int]]
    types: list[list[int]]
    pad: int  # the id that fills up shorter sentences


class ServeReply(TypedDict):
    batches: int


class CrowdReply(TypedDict):
    runs_per_second: list[float]  # of each session, all of them at work at the same time
