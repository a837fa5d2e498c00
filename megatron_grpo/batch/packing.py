"""The plan of a batch: the sequences of each replica and their microbatches, packed or padded to rectangles."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import PolicyConfig

Lengths = Sequence[int] | NDArray[np.integer]
"""Tokens of each sequence, [sequences]."""

BIN_GROWTH = 1.01
"""Factor by which the number of bins grows when the sequences did not fit."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of computing a sequence, in any unit."""

    per_token: float
    per_pair: float
    """Cost of a pair of a query and a key that it attends to; it makes cost grow faster than length."""
    window: int | None = None
    """Tokens that each token sees in the layers that have a window, itself included; None: no layer has one."""
    per_windowed_pair: float = 0.0
    """Cost of a pair in the layers with a sliding window."""

    def compute(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Costs of sequences, [sequences], float64, from their lengths, [sequences], int64."""
        cost = self.per_token * lengths + self.per_pair * (lengths * (lengths + 1) / 2)
        if self.window is None:
            return cost
        within = np.minimum(lengths, self.window)
        return cost + self.per_windowed_pair * (within * (within + 1) / 2 + self.window * (lengths - within))


OF_TOKENS = Cost(per_token=1.0, per_pair=0.0)
"""Cost by length alone, as if attention were free."""


@dataclass(frozen=True, slots=True)
class SequencePacker:
    """Plans microbatches of sequences laid end to end, each with at most `microbatch_tokens`.

    A plan has two aims that pull apart. Every microbatch has a fixed overhead (kernel launches, and with pipelines and
    expert parallelism a collective per layer), so there should be as few as the memory of one allows. And replicas wait
    for each other at every optimizer step, so all should need equally long, which is a matter of cost and not of
    tokens: because of attention, one sequence of 8,000 tokens costs more than eight of 1,000. So the number of
    microbatches is settled by tokens, as the fewest found that the sequences fit into, and the sequences are spread
    over this number by cost: longest first, each goes to the bin with the least cost that still has room (Graham 1969,
    "longest processing time"). The same rule then deals whole bins to replicas, equally many to each, because replicas
    that share experts go through their microbatches in step. Takes O(n log n) time for n sequences.
    """

    microbatch_tokens: int
    """Most tokens of a microbatch, padding included; a sequence that is longer alone gets one of its own."""
    multiple: int
    """Number of tokens of which the length of every padded sequence is a multiple."""
    cost: Cost

    def assign_to_replicas(self, lengths: NDArray[np.int64], replicas: int) -> list[list[int]]:
        """Sequences for each replica, so that all have equally much to compute.

        Args:
            lengths: [sequences], int64: tokens of each sequence, at least one for each replica.
            replicas: number of model replicas.

        Returns:
            For each replica indices into `lengths`.

        Raises:
            ValueError: there are fewer sequences than replicas, or the replicas cannot have equally many microbatches.
                With any multiple of `replicas` sequences they can.
        """
        if len(lengths) < replicas:
            raise ValueError(f"{len(lengths)} sequences do not give each of {replicas} data-parallel ranks one")
        bins = self._fewest(lengths, replicas)
        costs = [float(self.cost.compute(lengths[one]).sum()) for one in bins]
        order = sorted(range(len(bins)), key=lambda number: -costs[number])
        shares = deal_to_replicas([costs[number] for number in order], replicas)
        return [[index for place in share for index in bins[order[place]]] for share in shares]

    def make_microbatches(self, of_replicas: Sequence[NDArray[np.int64]]) -> list[list[list[int]]]:
        """Microbatches of replicas whose sequences are fixed; equally many on each that has enough sequences.

        Args:
            of_replicas: for each replica [sequences], int64: tokens of each sequence.

        Returns:
            For each replica its microbatches, costliest first, each a list of indices into its lengths.
        """
        plans = [self._fewest(lengths, 1) for lengths in of_replicas]
        most = max(map(len, plans))
        while True:
            wanted = [min(most, len(lengths)) for lengths in of_replicas]
            tried = [self._filled(lengths, count) for lengths, count in zip(of_replicas, wanted, strict=True)]
            if all(plan is not None for plan in tried):
                return [
                    self._costliest_first(lengths, plan or []) for lengths, plan in zip(of_replicas, tried, strict=True)
                ]
            most = max(most + 1, int(most * BIN_GROWTH))

    def _fewest(self, lengths: NDArray[np.int64], replicas: int) -> list[list[int]]:
        """Sequences of these lengths in the fewest bins found to hold them, a multiple of `replicas`."""
        widths = self._widths(lengths)
        count = -(-int(np.minimum(widths, self.microbatch_tokens).sum()) // self.microbatch_tokens)
        while True:
            count = min(-(-count // replicas) * replicas, len(lengths) // replicas * replicas)
            bins = self._filled(lengths, count)
            if bins is not None:
                return bins
            if count >= len(lengths) // replicas * replicas:  # a bin for each sequence, and some sequences have none
                raise ValueError(
                    f"{len(lengths)} sequences need more microbatches of {self.microbatch_tokens} tokens than can be "
                    f"shared out evenly over {replicas} data-parallel ranks; use a multiple of {replicas} sequences"
                )
            count = max(count + 1, int(count * BIN_GROWTH))

    def _filled(self, lengths: NDArray[np.int64], count: int) -> list[list[int]] | None:
        """Sequences of these lengths in `count` bins, none empty; None: no such distribution was found."""
        widths = self._widths(lengths).tolist()
        costs = self.cost.compute(lengths).tolist()
        bins: list[list[int]] = [[] for _ in range(count)]
        room = [self.microbatch_tokens] * count
        open_bins = [(0.0, number) for number in range(count)]  # a heap by cost
        narrow: list[tuple[int, int, float]] = []  # a heap by room, the most first: bins too full for this width
        for index in sorted(range(len(widths)), key=lambda i: (-widths[i], i)):
            width = widths[index]
            while narrow and -narrow[0][0] >= width:
                _, number, done = heapq.heappop(narrow)
                heapq.heappush(open_bins, (done, number))
            while open_bins and bins[open_bins[0][1]] and room[open_bins[0][1]] < width:
                done, number = heapq.heappop(open_bins)
                heapq.heappush(narrow, (-room[number], number, done))
            if not open_bins:
                return None
            done, number = heapq.heappop(open_bins)
            bins[number].append(index)
            room[number] -= width
            heapq.heappush(open_bins, (done + costs[index], number))
        return bins if all(bins) else None

    def _widths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Padded lengths of sequences, [sequences], int64."""
        return -(-np.maximum(lengths, 1) // self.multiple) * self.multiple

    def _costliest_first(self, lengths: NDArray[np.int64], bins: list[list[int]]) -> list[list[int]]:
        """The bins, costliest first; the sequences of each are in ascending order."""
        costs = [float(self.cost.compute(lengths[one]).sum()) for one in bins]
        return [sorted(bins[number]) for number in sorted(range(len(bins)), key=lambda number: -costs[number])]


@dataclass(frozen=True, slots=True)
class SequencePadder:
    """Plans microbatches of sequences of similar length, each a rectangle as wide as its longest sequence.

    A plan takes the fewest rectangles that fit, cuts the sequences in order of length so that the largest rectangle is
    as small as possible, and gives each rectangle, largest first, to the replica with the least work. Takes O(n log n)
    time for n sequences: a few microseconds for each.
    """

    microbatch_tokens: int
    """Most tokens of a rectangle; a sequence that is longer alone gets one of its own."""
    multiple: int
    """Number of columns of which the width of every rectangle is a multiple."""

    def assign_to_replicas(self, lengths: Lengths, replicas: int) -> list[list[int]]:
        """For each replica indices into `lengths`, as `SequencePacker.assign_to_replicas` gives them."""
        return [
            [index for microbatch in mine for index in microbatch]
            for mine in self.assign_microbatches(lengths, replicas)
        ]

    def assign_microbatches(self, lengths: Lengths, replicas: int) -> list[list[list[int]]]:
        """For each replica its microbatches, equally many for all and none empty; equal arguments give equal plans.

        Args:
            lengths: [sequences], integers: tokens of each sequence.
            replicas: number of model replicas.

        Raises:
            ValueError: the replicas cannot have equally many microbatches. With any multiple of `replicas` sequences
                they can.
        """
        if len(lengths) < max(replicas, 1):
            raise ValueError(f"{len(lengths)} sequences do not give each of {replicas} data-parallel ranks one")
        fewest = self.count_microbatches(lengths)
        # Rounded up to a multiple: ranks that meet in a collective for every microbatch must have equally many.
        wanted = -(-fewest // replicas) * replicas
        if wanted > len(lengths):
            raise ValueError(
                f"{len(lengths)} sequences need {fewest} microbatches of {self.microbatch_tokens} tokens, which cannot "
                f"be shared out evenly over {replicas} data-parallel ranks; use a multiple of {replicas} sequences"
            )
        order, widths = self._by_length(lengths)
        rectangles = self._rectangles(widths, wanted)
        shares = deal_to_replicas([count * widths[start] for start, count in rectangles], replicas)
        cut = [order[start : start + count] for start, count in rectangles]
        return [[cut[number] for number in share] for share in shares]

    def make_microbatches(self, of_replicas: Sequence[Lengths]) -> list[list[list[int]]]:
        """For each replica its microbatches, largest first, as `SequencePacker.make_microbatches` gives them."""
        most = max(map(self.count_microbatches, of_replicas))
        return [self.make_replica_microbatches(lengths, most) for lengths in of_replicas]

    def make_replica_microbatches(self, lengths: Lengths, microbatches: int) -> list[list[int]]:
        """This many microbatches of one replica, largest first; at most as many as it has sequences."""
        order, widths = self._by_length(lengths)
        rectangles = self._rectangles(widths, min(microbatches, len(widths)))
        return [order[start : start + count] for start, count in rectangles]

    def count_microbatches(self, lengths: Lengths) -> int:
        """Number of microbatches that sequences of these lengths, [sequences], integers, need."""
        return len(_cut(self._by_length(lengths)[1], self.microbatch_tokens))

    def _by_length(self, lengths: Lengths) -> tuple[list[int], list[int]]:
        """Indices of the sequences, longest first, and the padded width of each; equally long ones keep their order."""
        tokens = np.asarray(lengths).tolist()
        order = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)
        return order, [-(-max(tokens[index], 1) // self.multiple) * self.multiple for index in order]

    def _rectangles(self, widths: list[int], microbatches: int) -> list[tuple[int, int]]:
        """Cut sequences into so many rectangles, as small as possible; the result is that of `_cut`, largest first."""
        # Bisection: a larger area never needs more rectangles, because each then reaches at least as far.
        areas = range(1, self.microbatch_tokens)
        smallest = 1 + bisect_left(areas, True, key=lambda area: len(_cut(widths, area)) <= microbatches)
        # While there are too few, the largest rectangle of several sequences (of equal ones, the first) is halved.
        parts = _cut(widths, smallest)
        singles: list[tuple[int, int]] = []
        heap: list[tuple[int, int, int]] = []
        while True:
            for start, count in parts:
                if count == 1:
                    singles.append((start, 1))
                else:
                    heapq.heappush(heap, (-count * widths[start], start, count))
            if len(singles) + len(heap) >= microbatches:
                break
            _, start, count = heapq.heappop(heap)
            parts = [(start, count // 2), (start + count // 2, count - count // 2)]
        cut = singles + [(start, count) for _, start, count in heap]
        return sorted(cut, key=lambda one: (-one[1] * widths[one[0]], one[0]))


def _cut(widths: list[int], area: int) -> list[tuple[int, int]]:
    """Cut sequences, in order of length, into rectangles of at most `area`; a sequence that is wider gets its own.

    Returns:
        For each rectangle the index of its first sequence, which is its widest, and the number of its sequences.
    """
    cut: list[tuple[int, int]] = []
    start = 0
    while start < len(widths):
        count = min(max(area // widths[start], 1), len(widths) - start)
        cut.append((start, count))
        start += count
    return cut


def deal_to_replicas(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """Deal microbatches in their order, equally many to each replica; returns the numbers of the microbatches of each.

    Each goes to the replica with the least cost so far among those that still lack microbatches; of equals, the first.

    Args:
        costs: cost of each microbatch; their number is a multiple of `replicas`.
        replicas: number of replicas.
    """
    shares: list[list[int]] = [[] for _ in range(replicas)]
    heap = [(0.0, replica) for replica in range(replicas)]
    for number, cost in enumerate(costs):
        done, replica = heapq.heappop(heap)
        shares[replica].append(number)
        if len(shares[replica]) < len(costs) // replicas:
            heapq.heappush(heap, (done + cost, replica))
    return shares


def make_packer(
    config: PolicyConfig, cost: Cost, microbatch_tokens: int | None = None
) -> SequencePacker | SequencePadder:
    """The planner of a model: assigns sequences to replicas and microbatches.

    Args:
        config: the model's section of the configuration.
        cost: cost of computing a sequence.
        microbatch_tokens: most tokens of a microbatch, padding included; None: policy.microbatch_tokens.
    """
    tokens = microbatch_tokens or config.microbatch_tokens
    if config.packing:
        return SequencePacker(tokens, config.parallel.chunk_multiple, cost)
    return SequencePadder(tokens, config.parallel.sequence_multiple)
