"""Groups of trajectories in the object store: small ones share an object, because each object costs a millisecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from megatron_grpo.data.packed import Packed
from megatron_grpo.data.trajectory import Outcome, SampledGroup, Trajectory

BUNDLE_BYTES = 2**20
"""Token data that share an object. An object lives as long as any of its groups is referred to."""

TOKEN_BYTES = 8
"""Of a token id and its log-probability."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the trajectories of a group are."""

    bundle: Any
    """Reference (Ray's) to a list of groups, each a list[Trajectory]."""
    place: int
    """Which of these groups."""


@dataclass(frozen=True, slots=True)
class Payloads:
    """Where the trajectories of many groups are, for a message: each object is named once."""

    bundles: list[Any]
    """References (Ray's) to lists of groups."""
    places: NDArray[np.int32]
    """[groups, 2]: number of a group's bundle, and its place in there."""

    @staticmethod
    def of(payloads: Sequence[Payload]) -> Payloads:
        """The groups of `payloads`, in their order."""
        numbers: dict[Any, int] = {}
        places = [(numbers.setdefault(one.bundle, len(numbers)), one.place) for one in payloads]
        return Payloads(list(numbers), np.array(places, dtype=np.int32).reshape(-1, 2))

    def each(self) -> list[Payload]:
        """One for each group."""
        return [Payload(self.bundles[bundle], place) for bundle, place in self.places.tolist()]

    def fetch(self, timeout_s: float | None = None) -> list[list[Trajectory]]:
        """The trajectories of each group.

        Args:
            timeout_s: deadline; None: the caller has one for this process.

        Raises:
            RayError: some are lost, or late.
        """
        bundles = ray.get(self.bundles, timeout=timeout_s)
        return [bundles[bundle][place] for bundle, place in self.places.tolist()]


@dataclass(frozen=True, slots=True)
class Collected:
    """A worker's answer: its groups, in the order in which it was given their prompts."""

    payloads: Payloads
    outcomes: list[list[Outcome]]
    """Sent as Packed."""
    remarks: list[str]
    """What somebody who watches the run should hear of."""


def groups_of(collected: Collected) -> list[SampledGroup]:
    """The groups of a worker's answer, in its order."""
    pairs = zip(collected.outcomes, collected.payloads.each(), strict=True)
    return [SampledGroup(outcomes, payload) for outcomes, payload in pairs]


class Bundler:
    """Puts groups into the object store as they come."""

    def __init__(self, groups: int) -> None:
        """
        Args:
            groups: how many will come.
        """
        self._payloads: list[Payload | None] = [None] * groups
        self._waiting: list[tuple[int, list[Trajectory]]] = []
        self._bytes = 0

    def add(self, number: int, trajectories: list[Trajectory]) -> None:
        """Take a group, to put it when enough have come together.

        Args:
            number: place of the group among all groups of the step.
            trajectories: samples of the group, in their order.
        """
        self._waiting.append((number, trajectories))
        for one in trajectories:
            self._bytes += TOKEN_BYTES * len(one.token_ids) + (0 if one.routed is None else one.routed.nbytes)
        if self._bytes >= BUNDLE_BYTES:
            self._put()

    def finish(self) -> Payloads:
        """Where every group is, when all have come."""
        if self._waiting:
            self._put()
        return Payloads.of([one for one in self._payloads if one is not None])

    def _put(self) -> None:
        bundle = ray.put(Packed([trajectories for _, trajectories in self._waiting]))
        for place, (number, _) in enumerate(self._waiting):
            self._payloads[number] = Payload(bundle, place)
        self._waiting, self._bytes = [], 0
