"""GOBO, a row of the paper's comparison: post-training, weights only, one dictionary per layer.

Zadeh et al., "GOBO: Quantizing Attention-Based NLP Models for Low Latency and Energy Efficient Inference",
2020. Per layer: (1) a Gaussian is fitted to the weights; those whose log-density is below −4 are outliers
and stay as they are; (2) the others are sorted into 2^b groups of equal population, whose means are the
first representative values; (3) weights go to their nearest value, values to the mean of their weights,
for as long as the sum of |w − ŵ| falls.

Note: this is not a method of `mrem quantize`. The values are on no grid, so there are no integers to multiply
and no QuantizeLinear to export. The model runs in torch, and its size is computed by a formula.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mrem_deploy.base.errors import UserError
from mrem_deploy.base.units import MIB
from mrem_deploy.models.architectures import anatomy
from mrem_deploy.numerics import UNQUANTIZED_BITS
from mrem_deploy.quant.spec import QuantSpec

LOG_DENSITY = -4.0  # of the fitted Gaussian; a weight below it is an outlier
MAX_ITERATIONS = 200  # only a bound: the sum of errors stops falling long before
VALUE_BYTES = POSITION_BYTES = 4


@dataclass(frozen=True)
class GoboSize:
    """Bytes of a GOBO model."""

    codes: float  # b bits for every weight, outliers included
    dictionaries: float
    outliers: float  # value and position of each
    full_precision: float  # what is not quantized
    outlier_share: float  # of the quantized weights

    @property
    def mb(self) -> float:
        """MiB."""
        return (self.codes + self.dictionaries + self.outliers + self.full_precision) / MIB


@dataclass(frozen=True)
class GoboWeight:
    """A weight after GOBO: its values, its outliers and its dictionary."""

    values: torch.Tensor
    outliers: torch.Tensor  # bool, the shape of the weight
    dictionary: torch.Tensor  # sorted
    iterations: int


def gobo_model(teacher: PreTrainedModel, spec: QuantSpec) -> tuple[PreTrainedModel, GoboSize]:
    """A copy of the model with every linear and the word embedding replaced by GOBO's values, and its size.

    Activations stay in full precision: 3-4-32 and 2-2-32 are the paper's rows.
    """
    if spec.activation_bits != UNQUANTIZED_BITS:
        raise UserError(
            f"GOBO quantizes weights only; got {spec.activation_bits}-bit activations",
            "give 32 bits for activations, such as 3-4-32",
        )
    model = copy.deepcopy(teacher)
    found = anatomy(model)
    codes = dictionaries = outliers = quantized = 0.0
    for name in (found.word_embedding, *found.linears):
        usual = spec.embedding_bits if name == found.word_embedding else spec.weight_bits
        bits = spec.bits_of(name, usual)
        if bits == UNQUANTIZED_BITS:
            continue
        layer = model.get_submodule(name)
        result = gobo_weight(layer.weight.detach(), bits)
        layer.weight.data = result.values
        count = float(result.outliers.sum())
        quantized += layer.weight.numel()
        codes += layer.weight.numel() * bits / 8
        dictionaries += VALUE_BYTES * len(result.dictionary)
        outliers += (VALUE_BYTES + POSITION_BYTES) * count
    rest = VALUE_BYTES * (sum(value.numel() for value in model.state_dict().values()) - quantized)
    share = outliers / (VALUE_BYTES + POSITION_BYTES) / quantized if quantized else 0.0
    return model, GoboSize(codes, dictionaries, outliers, rest, share)


def gobo_weight(weight: torch.Tensor, bits: int) -> GoboWeight:
    """Steps 1 to 3 for one layer."""
    outliers = find_outliers(weight)
    ordered, order = weight[~outliers].double().sort()
    dictionary, iterations = find_dictionary(ordered, 2**bits)
    values = weight.clone()
    mapped = torch.empty_like(ordered)
    mapped[order] = dictionary[_nearest(ordered, dictionary)]
    values[~outliers] = mapped.to(weight.dtype)
    return GoboWeight(values, outliers, dictionary.to(weight.dtype), iterations)


def find_outliers(weight: torch.Tensor) -> torch.Tensor:
    """Where log N(w; μ, σ²) < −4, with μ and σ those of the layer's weights."""
    w = weight.double()
    mean, deviation = w.mean(), w.std(correction=0)
    if deviation == 0:
        return torch.zeros_like(weight, dtype=torch.bool)
    log_density = -((w - mean) / deviation).square() / 2 - torch.log(deviation * math.sqrt(2 * math.pi))
    return log_density < LOG_DENSITY


def find_dictionary(ordered: torch.Tensor, count: int) -> tuple[torch.Tensor, int]:
    """At most `count` representative values of sorted weights, and the number of iterations.

    The weights of one value are consecutive, so their mean is a difference of two prefix sums.
    """
    if len(ordered) == 0:
        return ordered, 0
    prefix = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    # groups of equal population: run i is cuts[i]..cuts[i + 1]
    cuts = torch.linspace(0, len(ordered), min(count, len(ordered)) + 1, dtype=torch.float64).round().long()
    best, best_error, iterations = _run_means(prefix, cuts), math.inf, 0
    values = best
    while iterations < MAX_ITERATIONS:
        nearest = _nearest(ordered, values)
        error = float((ordered - values[nearest]).abs().sum())
        if error >= best_error:
            break
        best, best_error = values, error
        iterations += 1
        ends = torch.searchsorted(nearest, torch.arange(len(values)), right=True)
        cuts = torch.cat([ends.new_zeros(1), ends])
        values = _run_means(prefix, cuts)
    return best, iterations


def _run_means(prefix: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """The mean of every run that is not empty, without duplicates."""
    cuts = cuts.unique()
    return (prefix[cuts].diff() / cuts.diff()).unique()


def _nearest(ordered: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The index of the closest value for each weight; halfway, the lower one."""
    return torch.bucketize(ordered, (values[1:] + values[:-1]) / 2)
