"""Implementations of the quantized ops to compare: the backends, and ordinary autograd ("unfused")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mrem_deploy.base.errors import UserError
from mrem_deploy.kernels import backends

UNFUSED = "unfused"
CONTENDERS = ("cpp", "triton", "reference", UNFUSED)
ELSEWHERE = {"cpp": "cuda", "triton": "cpu"}  # the kind of device on which they do not compute
ON_CPU = tuple(name for name in CONTENDERS if ELSEWHERE.get(name) != "cpu")


def contender(text: str) -> str:
    """An argparse type: one that can run here."""
    if text not in CONTENDERS:
        raise UserError(f"--kernels must be among {', '.join(CONTENDERS)}; got {text!r}", "name one of these")
    if text != UNFUSED and (problem := backends.problem_of(text)):
        raise UserError(f"--kernels {text}: {problem}", backends.remedy_of(text))
    return text


def present(device: str = "cpu") -> tuple[str, ...]:
    """All that can run on that kind of device; the first is what a real run uses."""
    fitting = [name for name in CONTENDERS if ELSEWHERE.get(name) != device]
    return tuple(name for name in fitting if name == UNFUSED or not backends.problem_of(name))


def check_device(names: Sequence[str], device: str) -> None:
    """Refuse those that do not compute there."""
    for name in names:
        if ELSEWHERE.get(name) == device:
            raise UserError(
                f"--kernels {name} does not compute on {device}", f"choose among {', '.join(present(device))}"
            )


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
