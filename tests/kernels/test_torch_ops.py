"""The ops as torch sees them: schema, shapes, gradients (opcheck), one graph when compiled, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrem_deploy.kernels import ops, torch_ops
from mrem_deploy.kernels.quantized import Quantized
from mrem_deploy.numerics import activation_grid, asymmetric_grid, midrise_grid, symmetric_grid
from mrem_deploy.quant.quantizers import LearnedScale

EIGHT = (8, -128, 127, 0)
FOUR = (4, -7, 7, 0)


def values(*shape: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def step(size: float = 0.05, grad: bool = True) -> torch.Tensor:
    return torch.tensor(size, requires_grad=grad)


def per_row(rows: int) -> torch.Tensor:
    return torch.full((rows, 1), 0.05, requires_grad=True)


KEYS = values(2, 6, 3, 8, grad=False).transpose(1, 2).transpose(-1, -2)  # (2, 3, 8, 6), as attention has them
SAMPLES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fake_quant": (torch_ops.fake_quant, (values(4, 9), step(), EIGHT)),
    "fake_quant per row": (torch_ops.fake_quant, (values(4, 9), per_row(4), FOUR)),
    "fake_quant of a transposed view": (torch_ops.fake_quant, (values(4, 9).detach().T, step(), EIGHT)),
    "fake_quant_backward": (
        torch_ops.fake_quant_backward,
        (values(4, 9, grad=False), values(4, 9, grad=False), step(grad=False), EIGHT),
    ),
    "linear, learned": (
        torch_ops.linear,
        (values(5, 9), values(7, 9), values(7), step(), per_row(7), None, EIGHT, FOUR, True),
    ),
    "linear, ternary": (
        torch_ops.linear,
        (values(5, 9), values(7, 9), None, step(), step(grad=False), step(0.3, grad=False), EIGHT,
         (2, -1, 1, 0), False),
    ),
    "linear, midrise": (
        torch_ops.linear,
        (values(5, 9), values(7, 9), None, step(), per_row(7).detach(), per_row(7).detach() * 2, EIGHT,
         (2, -3, 3, 0, 2), False),
    ),
    "linear_backward": (
        torch_ops.linear_backward,
        (values(5, 7, grad=False), values(5, 9, grad=False), values(7, 9, grad=False), step(grad=False),
         step(grad=False), None, EIGHT, FOUR, True, True, True),
    ),
    "matmul": (torch_ops.matmul, (values(2, 3, 5, 8), KEYS, step(), step(), EIGHT, EIGHT)),
    "matmul_backward": (
        torch_ops.matmul_backward,
        (values(2, 3, 5, 6, grad=False), values(2, 3, 5, 8, grad=False), KEYS, step(grad=False),
         step(grad=False), EIGHT, EIGHT),
    ),
    "twn": (torch_ops.twn, (values(5, 9, grad=False), True)),
    "midrise": (torch_ops.midrise, (values(5, 9, grad=False), True)),
    "midrise, one scale": (torch_ops.midrise, (values(5, 9, grad=False), False)),
    "laq": (torch_ops.laq, (values(5, 9, grad=False), step(grad=False), None, FOUR, 2, False)),
    "laq with curvature": (
        torch_ops.laq,
        (values(5, 9, grad=False), per_row(5).detach(), values(5, 9).detach().abs(), FOUR, 2, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MREM_BACKEND", backend)
    op, arguments = SAMPLES[name]
    torch.library.opcheck(op, arguments)


class TinyModule(torch.nn.Module):
    """Products with a ternary and a midrise weight and one of two activations, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(values(16, 16).detach())
        self.bias = torch.nn.Parameter(torch.zeros(16))
        self.left = LearnedScale(torch.tensor(0.05), asymmetric_grid(8, 100))
        self.right = LearnedScale(torch.tensor(0.05), activation_grid(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        threshold, scale = ops.twn(self.weight, per_row=True)
        ternary = Quantized(scale, symmetric_grid(2), threshold)
        left = Quantized(self.left.scale, self.left.grid)
        right = Quantized(self.right.scale, self.right.grid)
        y = ops.fake_quant_linear(x, self.weight, self.bias, left, ternary)
        threshold, scale = ops.midrise(self.weight, per_row=False)
        midrise = Quantized(scale, midrise_grid(), threshold)
        y = ops.fake_quant_linear(y, self.weight, None, left, midrise)
        scores = ops.fake_quant_matmul(y, x.transpose(-1, -2), left, right)
        return self.right(scores.softmax(-1))


@pytest.mark.slow
def test_a_training_step_compiles_to_one_graph_with_the_ops_inside() -> None:
    seen: list[str] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    plain, x = TinyModule(), values(3, 7, 16)
    compiled = torch.compile(plain, fullgraph=True, backend=aot_autograd(fw_compiler=count))
    plain(x).square().sum().backward()
    expected = [(p.grad.clone(), p.grad.zero_())[0] for p in (x, *plain.parameters()) if p.grad is not None]
    compiled(x).square().sum().backward()
    came = [p.grad for p in (x, *plain.parameters()) if p.grad is not None]
    assert len(came) == len(expected) == 5
    for ours, theirs in zip(came, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # the compiler may reorder sums
    for op in ("fake_quant_linear", "fake_quant_matmul", "fake_quant_linear_backward", "twn", "midrise"):
        assert any(name.startswith(f"mrem.{op}.") for name in seen), (op, seen)


# -- refusals ------------------------------------------------------------------------------------------------

X, W, S, G = values(4, 9, grad=False), values(7, 9, grad=False), step(grad=False), activation_grid(8)
Q = Quantized(S, G)
REFUSED = {
    "integers": (
        ops.fake_quant,
        (torch.ones(3, dtype=torch.int32), S, G),
        TypeError,
        "16-, 32- or 64-bit floats",
    ),
    "empty": (ops.fake_quant, (torch.ones(0, 4), S, G), ValueError, "x is empty"),
    "scale of another type": (ops.fake_quant, (X, S.double(), G), TypeError, "scale as torch.float32 on cpu"),
    "scales that fit no row": (
        ops.fake_quant,
        (X, torch.ones(3, 1), G),
        ValueError,
        r"\(4, 1\), got \(3, 1\)",
    ),
    "another device": (
        ops.fake_quant_linear,
        (X, W.to("meta"), None, Q, Q),
        TypeError,
        "weight as torch.float32 on cpu.* on meta: convert",
    ),
    "inner sizes differ": (
        ops.fake_quant_linear,
        (X, W[:, :8], None, Q, Q),
        ValueError,
        r"\(4, 9\) and",
    ),
    "bias of a wrong size": (
        ops.fake_quant_linear,
        (X, W, torch.ones(6), Q, Q),
        ValueError,
        "one bias for each of 7 outputs",
    ),
    "input per row": (
        ops.fake_quant_linear,
        (X, W, None, Quantized(torch.ones(4, 1), G), Q),
        ValueError,
        "one x_quant.scale: activations are quantized per tensor",
    ),
    "ternary input": (
        ops.fake_quant_matmul,
        (X, W.T, Quantized(S, G, threshold=S), Q),
        ValueError,
        "no a_quant.threshold: only a linear's weight",
    ),
    "ternary and learned": (
        ops.fake_quant_linear,
        (X, W, None, Q, Quantized(S, symmetric_grid(2), threshold=S, learned=True)),
        ValueError,
        "give either a threshold or learned",
    ),
    "midrise without a threshold": (
        ops.fake_quant_linear,
        (X, W, None, Q, Quantized(S, midrise_grid())),
        ValueError,
        "w_quant.grid of consecutive integers.*needs a threshold",
    ),
    "midrise activations": (
        ops.fake_quant_matmul,
        (X, W.T, Q, Quantized(S, midrise_grid())),
        ValueError,
        "b_quant.grid of consecutive integers",
    ),
    "rounding to a midrise grid": (
        ops.fake_quant,
        (X, S, midrise_grid()),
        ValueError,
        "grid of consecutive integers",
    ),
    "a loss-aware scale of a midrise grid": (
        ops.laq,
        (W, S, None, midrise_grid(), 2, False),
        ValueError,
        "grid of consecutive integers",
    ),
    "matmul shapes": (ops.fake_quant_matmul, (X, W, Q, Q), ValueError, r"\(…, M, K\) and \(…, K, N\)"),
    "curvature of another shape": (
        ops.laq,
        (W, S, W[:2], symmetric_grid(4), 2, False),
        ValueError,
        "a curvature for each weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_clear_words(case: str) -> None:
    op, arguments, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        op(*arguments)
