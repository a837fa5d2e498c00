"""Groups of trajectories in Ray's object store, small ones together in one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from megatron_grpo.batch.trajectory import Outcome, SampledGroup, Trajectory
from megatron_grpo.cluster.futures import wrap_for_pickling

OBJECT_BYTES = 2**20
"""Size of token data that shares one Ray object, which lives as long as a reference to any of its groups."""
TOKEN_BYTES = 8
"""Bytes of a token id and its log-probability."""


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """References to groups of trajectories, each object named once.

    Example: of three groups, two small ones share an object:
        PackedGroups([ref_a, ref_b], array([[0, 0], [0, 1], [1, 0]]))
    """

    references: list[Any]
    """Ray's references to lists of groups."""
    indices: NDArray[np.int32]
    """[groups, 2], int32: for each group the index of its reference, and its index in that list."""
    outcomes: list[list[Outcome]] = field(default_factory=list)
    """Outcomes of each group, for the driver; empty where only tokens are needed."""

    def select(self, groups: Sequence[int]) -> PackedGroups:
        return PackedGroups(self.references, self.indices[groups])

    def fetch(self, timeout_s: float | None = None) -> list[list[Trajectory]]:
        """Fetch the trajectories of each group; RayError if lost."""
        # Each object is fetched once, however many of its groups are needed.
        needed = np.unique(self.indices[:, 0]).tolist()
        objects = ray.get([self.references[number] for number in needed], timeout=timeout_s)
        groups = dict(zip(needed, objects, strict=True))
        return [groups[number][index] for number, index in self.indices.tolist()]

    def to_message(self) -> PackedGroups:
        """Wrap the outcomes, so that Ray pickles them fast."""
        return replace(self, outcomes=wrap_for_pickling(self.outcomes))

    def unpack(self) -> list[SampledGroup]:
        """Convert to one reference for each group."""
        pairs = zip(self.outcomes, self.indices.tolist(), strict=True)
        return [SampledGroup(outcomes, self.references[number], index) for outcomes, (number, index) in pairs]


def pack_groups(groups: Sequence[SampledGroup]) -> PackedGroups:
    """Pack the references of groups, without their outcomes."""
    numbers: dict[Any, int] = {}
    indices = [(numbers.setdefault(group.objects_ref, len(numbers)), group.index_in_ref) for group in groups]
    return PackedGroups(list(numbers), np.array(indices, dtype=np.int32).reshape(-1, 2))


def store_groups(groups: Sequence[Sequence[Trajectory]]) -> PackedGroups:
    """Put groups into the object store, in their order."""
    references: list[Any] = []
    together: list[Sequence[Trajectory]] = []
    indices, size = np.zeros((len(groups), 2), dtype=np.int32), 0
    # Every Ray object has a cost of its own, so groups are put together until they have OBJECT_BYTES. Larger objects
    # would stay in memory as long as any of their groups, such as one that waits for a later step.
    for number, trajectories in enumerate(groups):
        indices[number] = len(references), len(together)
        together.append(trajectories)
        for trajectory in trajectories:
            size += TOKEN_BYTES * trajectory.tokens + (0 if trajectory.routed is None else trajectory.routed.nbytes)
        if size >= OBJECT_BYTES or number == len(groups) - 1:
            references.append(ray.put(wrap_for_pickling(together)))
            together, size = [], 0
    return PackedGroups(references, indices, [[trajectory.outcome for trajectory in group] for group in groups])
