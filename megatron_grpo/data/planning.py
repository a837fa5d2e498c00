"""How the sequences of a step are shared out over replicas and microbatches: packed, or as rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.data.bins import Bins, Cost
from megatron_grpo.data.packing import fewest_microbatches, plan_microbatches, plan_replica


class Planner(Protocol):
    """Decides who computes what with whom."""

    def share(self, lengths: NDArray[np.int64], replicas: int) -> list[list[int]]:
        """For each replica indices into `lengths`, [sequences], int64, so that all have about equally much to do."""

    def microbatches(self, of_replicas: Sequence[NDArray[np.int64]]) -> list[list[list[int]]]:
        """For each replica, whose sequences have these lengths, its microbatches as lists of indices into them.

        There are as many on each replica, as far as sequences go: none waits for longer than it must.
        """


def planner(config: PolicyConfig, cost: Cost, microbatch_tokens: int | None = None) -> Planner:
    """The planner of a model.

    Args:
        config: how its microbatches are made.
        cost: what a sequence costs to compute.
        microbatch_tokens: most tokens of a microbatch, padding included; None: policy.microbatch_tokens.
    """
    tokens = microbatch_tokens or config.microbatch_tokens
    if config.packing:
        return Bins(tokens, config.parallel.chunk_multiple, cost)
    return Rectangles(tokens, config.parallel.sequence_multiple)


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Sequences of like length share a microbatch, and are padded to the longest of them."""

    microbatch_tokens: int
    multiple: int
    """What the widths of rectangles are a multiple of."""

    def share(self, lengths: NDArray[np.int64], replicas: int) -> list[list[int]]:
        plan = plan_microbatches(
            lengths,
            data_parallel=replicas,
            microbatch_tokens=self.microbatch_tokens,
            pad_to_multiple=self.multiple,
        )
        return [[index for microbatch in microbatches for index in microbatch] for microbatches in plan]

    def microbatches(self, of_replicas: Sequence[NDArray[np.int64]]) -> list[list[list[int]]]:
        sizes = {"microbatch_tokens": self.microbatch_tokens, "pad_to_multiple": self.multiple}
        most = max(fewest_microbatches(lengths, **sizes) for lengths in of_replicas)
        return [plan_replica(lengths, microbatches=most, **sizes) for lengths in of_replicas]
