"""Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): train only on prompts whose samples differ in reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class DynamicBatch(Generic[Group]):
    """What dynamic sampling made of one generation batch."""

    groups: list[Group]
    """Groups to train on, num_prompts_per_step of them; empty while the batch is not complete."""
    is_batch_complete: bool
    """Whether training can begin; otherwise further prompts have to be sampled."""
    batch_cache: list[Group]
    """Groups with a signal that wait for the rest of their step; empty when the batch is complete."""
    without_signal: int
    """Groups of this generation batch that were dropped because all their rewards are equal."""
    surplus: int
    """Groups with a signal that were cut off because the step was full without them."""


def dynamic_sampling(
    groups: Sequence[Group], signal: Tensor, *, num_prompts_per_step: int, batch_cache: Sequence[Group] = ()
) -> DynamicBatch[Group]:
    """Add the groups with a signal to those that already wait, and say whether they fill a step.

    Groups keep the order in which they were sampled. What is over after slicing is not kept for the next step: it was
    sampled from weights that are about to change.

    Args:
        groups: groups of one generation batch.
        signal: [groups], bool, see `has_signal`.
        num_prompts_per_step: groups that a step trains on.
        batch_cache: what earlier generation batches of this step left waiting.
    """
    assert signal.shape == (len(groups),)
    assert signal.dtype == torch.bool
    useful = [*batch_cache, *(group for group, useful in zip(groups, signal.tolist(), strict=True) if useful)]
    complete = len(useful) >= num_prompts_per_step
    return DynamicBatch(
        groups=useful[:num_prompts_per_step] if complete else [],
        is_batch_complete=complete,
        batch_cache=[] if complete else useful,
        without_signal=int((~signal).sum()),
        surplus=max(0, len(useful) - num_prompts_per_step),
    )
