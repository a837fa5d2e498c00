"""Distances from transformers in float64, and those that rounding to float32 explains.

An absolute tolerance is too narrow for models with large logits and too wide for others. So transformers in float32
says how far rounding leads away from float64 in this model, and a layout may be a small multiple of it away. Over the
families (one rank, and some of them in other layouts) the root mean square of a layout's differences was 0.8 to 1.2
times that of transformers, the largest 0.6 to 1.4 times; the gradient of a tensor was up to 3 times as far, of Mamba's
decays 8 times, which are computed by another algorithm (2026-11-28).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# A layout's distance may be this many times that of transformers. The median stays sharp where a near tie of experts
# makes the others large.
FACTORS = {"logprob": 8.0, "logprob_rms": 3.0, "logprob_median": 3.0}
GRADIENT_FACTOR = 10.0
FLOAT32_ULP = 2.0**-24  # relative rounding error of one operation
LEAST_GRADIENT = 2e-5  # relative error of a gradient that is always rounding: some 300 rounded operations
LEAST_LOSS = 1e-5  # difference of losses that is always rounding
LEAST_SHARE = 1e-4  # of the whole gradient's norm; relative errors of smaller gradients are relative to that


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Distance of results from those of float64."""

    logprob: float
    """Largest difference of a log-probability, in nats."""
    logprob_rms: float
    """Root mean square of these differences."""
    logprob_median: float
    """Median of their absolute values."""
    gradients: Mapping[str, float]
    """Relative error by tensor; infinite if the tensor is missing."""


def measure_distance(
    logprobs: Tensor, gradients: Mapping[str, Tensor], exact_logprobs: Tensor, exact_gradients: Mapping[str, Tensor]
) -> Distance:
    """Measure the distance of results from exact ones.

    Log-probabilities are [tokens], 0 at the first token of each sequence.
    """
    is_token = (exact_logprobs != 0) | (logprobs != 0)
    # Infinite in place of NaN, which no comparison shows.
    differences = torch.nan_to_num((logprobs.double() - exact_logprobs).abs(), nan=math.inf)[is_token]
    # A gradient that is 0 but for rounding has no relative error: the factor of a single expert before a norm.
    least = LEAST_SHARE * torch.stack([tensor.norm() for tensor in exact_gradients.values()]).norm()
    errors = dict.fromkeys(exact_gradients, math.inf)
    for name in exact_gradients.keys() & gradients.keys():
        exact = exact_gradients[name]
        error = float((gradients[name].double() - exact).norm() / exact.norm().clamp(min=least))
        errors[name] = error if math.isfinite(error) else math.inf
    return Distance(
        logprob=float(differences.max()),
        logprob_rms=float(differences.square().mean().sqrt()),
        logprob_median=float(differences.median()),
        gradients=errors,
    )


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Largest distances that rounding explains."""

    logprobs: Mapping[str, float]
    """By the names of `Distance`, in nats."""
    gradients: Mapping[str, float]
    """Relative error by tensor."""
    sensitivity: float = 1.0
    """Largest change of the loss if each log-probability is off by 1, for small errors."""

    @staticmethod
    def from_reference(reference: Distance, largest: float, sensitivity: float = 1.0) -> Tolerances:
        """Choose them by the distance of transformers in float32.

        `largest`: largest log-probability, absolute. A log-probability of this size cannot be rounded more exactly.
        """
        least = FLOAT32_ULP * largest
        logprobs = {name: factor * max(getattr(reference, name), least) for name, factor in FACTORS.items()}
        typical = statistics.median(reference.gradients.values())
        gradients = {
            name: max(LEAST_GRADIENT, GRADIENT_FACTOR * max(error, typical))
            for name, error in reference.gradients.items()
        }
        return Tolerances(logprobs, gradients, sensitivity)

    @property
    def loss(self) -> float:
        """Largest difference of the loss after optimizer steps."""
        # The loss is a mean of log-probabilities times advantages; ratios of whole responses add up many errors.
        return max(LEAST_LOSS, self.logprobs["logprob"] * max(1.0, self.sensitivity))
