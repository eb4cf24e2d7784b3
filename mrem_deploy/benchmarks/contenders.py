"""Implementations of the quantized ops to compare: the backends, and ordinary autograd ("unfused")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels import backends

UNFUSED = "unfused"
CONTENDERS = ("cpp", "reference", UNFUSED)  # a GPU is not timed here


def contender(text: str) -> str:
    """An argparse type: one that can run here."""
    if text not in CONTENDERS:
        raise UserError(f"--kernels must be among {', '.join(CONTENDERS)}; got {text!r}", "name one of these")
    if text != UNFUSED and (problem := backends.problem_of(text)):
        raise UserError(f"--kernels {text}: {problem}", backends.remedy_of(text))
    return text


def present() -> tuple[str, ...]:
    """All that can run here; the first is what a real run uses."""
    return tuple(name for name in CONTENDERS if name == UNFUSED or not backends.problem_of(name))


@contextmanager
def computing_with(name: str) -> Iterator[None]:
    """Inside, quantized layers compute with that implementation."""
    if name == UNFUSED:
        from mrem_deploy.benchmarks.unfused import unfused

        with unfused():
            yield
        return
    backends.use_backend(name)
    try:
        yield
    finally:
        backends.use_backend("auto")
