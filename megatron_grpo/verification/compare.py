"""One line of the table: what a layout found against what transformers found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.data.batch import TokenBatch
from megatron_grpo.verification.on_rank import Findings
from megatron_grpo.verification.problem import Truth

TOLERANCES = {"logprob": 2e-5, "gradient": 1e-4, "loss": 1e-5}
"""Largest allowed difference of log-probabilities (absolute), of gradients (relative norm of each tensor) and of the
loss after the optimizer steps (absolute, against one rank)."""


@dataclass(frozen=True, slots=True)
class Row:
    """How a layout came out."""

    layout: str
    packed: bool
    logprob: float
    """Largest difference of a log-probability."""
    gradient: float
    """Largest relative error of a tensor's gradient."""
    loss: float
    """Difference of the loss after the optimizer steps; 0 for the layout of one rank, which the others are held to."""
    exact: bool
    """Whether what was imported is exported bit by bit."""
    peak_gib: float
    """Of the rank that took most memory."""
    step_s: float
    """Median of an optimizer step, of the slowest rank."""
    final_loss: float

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        within = (getattr(self, name) <= limit for name, limit in TOLERANCES.items())
        return self.exact and all(within)


def compare(
    name: str, packed: bool, found: Sequence[Findings], truth: Truth, batch: TokenBatch, one_rank: Row | None
) -> Row:
    """What the ranks of a layout found, against transformers and the layout of one rank (None: this is it)."""
    logprobs = {number: values for one in found for number, values in one.logprobs.items()}
    expected = truth.logprobs.split(batch.lengths)
    assert sorted(logprobs) == list(range(len(expected))), "every sequence is reported once"
    final = sum(one.losses[-1] for one in found)
    return Row(
        layout=name,
        packed=packed,
        # Of all in one tensor, whose maximum is NaN when any is: Python's would pass over it.
        logprob=float(torch.cat([logprobs[n] - expected[n] for n in logprobs]).abs().max()),
        gradient=_relative_error(found, truth.gradients),
        loss=0.0 if one_rank is None else abs(final - one_rank.final_loss),
        exact=_same_weights(found, truth.weights),
        peak_gib=max(one.peak_bytes for one in found) / 2**30,
        step_s=max(one.step_s for one in found),
        final_loss=final,
    )


def _relative_error(found: Sequence[Findings], truth: dict[str, Tensor]) -> float:
    """Infinite when a tensor is missing, or not finite. What no gradient moves is exported too, and not looked at."""
    gradients = {name: tensor for one in found for name, tensor in one.gradients.items()}
    if not truth.keys() <= gradients.keys():
        return float("inf")
    errors = torch.stack([(gradients[n] - truth[n]).norm() / truth[n].norm() for n in truth])
    return float(errors.max()) if bool(errors.isfinite().all()) else float("inf")


def _same_weights(found: Sequence[Findings], truth: dict[str, Tensor]) -> bool:
    names = {name for one in found for name in one.weights}
    return names == truth.keys() and all(
        torch.equal(tensor, truth[name]) for one in found for name, tensor in one.weights.items()
    )
