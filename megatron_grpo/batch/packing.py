"""Divides sequences among replicas and into microbatches, packed end to end or padded to rectangles."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import PolicyConfig

Lengths = Sequence[int] | NDArray[np.integer]  # tokens of each sequence, [sequences]
BIN_GROWTH = 1.01  # if the sequences do not fit n bins, try 1 % more


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of computing a sequence, in any unit."""

    per_token: float
    per_pair: float  # cost of a pair of a query and a key that it attends to
    window: int | None = None  # tokens that a token sees in layers with a window, itself included; None: no such layer
    per_windowed_pair: float = 0.0  # cost of a pair in the layers with a sliding window
    chunked: bool = False  # whether the windows are chunks, of which a token sees the part before it

    def compute(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Compute the cost of each sequence: [sequences], float64."""
        cost = self.per_token * lengths + self.per_pair * (lengths * (lengths + 1) / 2)
        if self.window is None:
            return cost
        if self.chunked:
            chunks, rest = np.divmod(lengths, self.window)
            pairs = chunks * (self.window * (self.window + 1) / 2) + rest * (rest + 1) / 2
            return cost + self.per_windowed_pair * pairs
        within = np.minimum(lengths, self.window)
        return cost + self.per_windowed_pair * (within * (within + 1) / 2 + self.window * (lengths - within))


TOKEN_COST = Cost(per_token=1.0, per_pair=0.0)  # cost by length alone, as if attention were free

# Why packing is done as it is. Two aims pull apart. Every microbatch has a fixed overhead (kernel launches, and with
# pipelines and expert parallelism a collective per layer), so there should be as few as the memory of one allows. And
# replicas wait for each other at every optimizer step, so all should need equally long, which is a matter of cost and
# not of tokens: because of attention, one sequence of 8,000 tokens costs more than eight of 1,000. So the number of
# microbatches is decided by tokens: the fewest for which the packer finds room. The sequences are then spread over
# this number by cost: longest first, each goes to the bin with the least cost that still has room (Graham 1969,
# "longest processing time"). The same rule then deals whole bins to replicas, equally many to each, because replicas
# that share experts go through their microbatches in step.


@dataclass(frozen=True, slots=True)
class SequencePacker:
    """Packs sequences end to end into microbatches of equal cost.

    Example: two bins of 8 tokens, one for each replica
        SequencePacker(microbatch_tokens=8, multiple=1, cost=TOKEN_COST).assign_to_replicas(np.array([6, 2, 3, 5]), 2)
        # [[0, 1], [3, 2]]
    """

    microbatch_tokens: int  # most tokens of a microbatch, with padding; a sequence longer than that gets its own
    multiple: int  # number of tokens of which the length of every padded sequence is a multiple
    cost: Cost

    def assign_to_replicas(self, lengths: NDArray[np.int64], replicas: int) -> list[list[int]]:
        """Divide sequences among replicas at equal cost; returns indices into `lengths`.

        Raises ValueError if there are fewer sequences than replicas.
        """
        if len(lengths) < replicas:
            raise ValueError(f"{len(lengths)} sequences do not give each of {replicas} data-parallel ranks one")
        bins = self._sort_by_cost(lengths, self._fill_fewest_bins(lengths, replicas))
        shares = deal_to_replicas([cost for cost, _ in bins], replicas)
        return [[index for number in share for index in bins[number][1]] for share in shares]

    def make_microbatches(self, replicas: Sequence[NDArray[np.int64]]) -> list[list[list[int]]]:
        """Make the microbatches of replicas whose sequences are fixed.

        Returns lists of indices into each replica's lengths, costliest first; equally many on each replica that has
        enough sequences.
        """
        # Replicas that share experts go through their microbatches in step: the one that needs most decides for all.
        count = max(len(self._fill_fewest_bins(lengths, 1)) for lengths in replicas)
        while True:
            filled = [self._fill_bins(lengths, min(count, len(lengths))) for lengths in replicas]
            if all(bins is not None for bins in filled):
                sorted_bins = [self._sort_by_cost(*pair) for pair in zip(replicas, filled, strict=True)]
                return [[sorted(indices) for _, indices in bins] for bins in sorted_bins]
            count = max(count + 1, int(count * BIN_GROWTH))

    def _fill_fewest_bins(self, lengths: NDArray[np.int64], replicas: int) -> list[list[int]]:
        """Fill as few bins as possible, if possible a multiple of `replicas`."""
        widths = self._pad(lengths)
        limit = len(lengths) // replicas * replicas
        count = -(-int(np.minimum(widths, self.microbatch_tokens).sum()) // self.microbatch_tokens)
        while True:
            count = min(-(-count // replicas) * replicas, limit)
            bins = self._fill_bins(lengths, count)
            if bins is not None:
                return bins
            if count >= limit:  # segments of rollouts can be of any number, so some replicas have a bin more
                return [[index] for index in range(len(lengths))]
            count = max(count + 1, int(count * BIN_GROWTH))

    def _fill_bins(self, lengths: NDArray[np.int64], count: int) -> list[list[int]] | None:
        """Fill `count` bins; None: no distribution was found."""
        widths = self._pad(lengths).tolist()
        costs = self.cost.compute(lengths).tolist()
        bins: list[list[int]] = [[] for _ in range(count)]
        room = [self.microbatch_tokens] * count
        # Two heaps keep this O(n log n). Widths only fall, so a bin that is too full for this sequence may have room
        # for a later one: it waits in `full_bins`, sorted by room, until a narrow enough sequence comes.
        open_bins = [(0.0, number) for number in range(count)]  # by cost
        full_bins: list[tuple[int, int, float]] = []  # by room, the most first
        for index in sorted(range(len(widths)), key=lambda i: (-widths[i], i)):
            width = widths[index]
            while full_bins and -full_bins[0][0] >= width:
                _, number, cost = heapq.heappop(full_bins)
                heapq.heappush(open_bins, (cost, number))
            while open_bins and bins[open_bins[0][1]] and room[open_bins[0][1]] < width:
                cost, number = heapq.heappop(open_bins)
                heapq.heappush(full_bins, (-room[number], number, cost))
            if not open_bins:
                return None
            cost, number = heapq.heappop(open_bins)
            bins[number].append(index)
            room[number] -= width
            heapq.heappush(open_bins, (cost + costs[index], number))
        return bins if all(bins) else None

    def _pad(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-np.maximum(lengths, 1) // self.multiple) * self.multiple

    def _sort_by_cost(self, lengths: NDArray[np.int64], bins: list[list[int]] | None) -> list[tuple[float, list[int]]]:
        pairs = [(float(self.cost.compute(lengths[indices]).sum()), indices) for indices in bins or []]
        return sorted(pairs, key=lambda pair: -pair[0])


@dataclass(frozen=True, slots=True)
class SequencePadder:
    """Pads sequences of similar lengths to rectangular microbatches.

    Takes the fewest rectangles that fit, cuts the sequences in order of length so that the largest rectangle is as
    small as possible, and gives each rectangle, largest first, to the replica with the least work.

    Example: two rectangles of at most 8 tokens, for one replica
        SequencePadder(microbatch_tokens=8, multiple=1).assign_microbatches([2, 6, 3], replicas=1)  # [[[1], [2, 0]]]
    """

    microbatch_tokens: int  # most tokens of a rectangle; a sequence that is longer alone gets one of its own
    multiple: int  # number of columns of which the width of every rectangle is a multiple

    def assign_to_replicas(self, lengths: Lengths, replicas: int) -> list[list[int]]:
        """Divide sequences among replicas, as `SequencePacker.assign_to_replicas` does."""
        assigned = self.assign_microbatches(lengths, replicas)
        return [[index for microbatch in microbatches for index in microbatch] for microbatches in assigned]

    def assign_microbatches(self, lengths: Lengths, replicas: int) -> list[list[list[int]]]:
        """Make each replica's microbatches, equally many if there are enough sequences."""
        if len(lengths) < max(replicas, 1):
            raise ValueError(f"{len(lengths)} sequences do not give each of {replicas} data-parallel ranks one")
        fewest = self.count_microbatches(lengths)
        # Rounded up to a multiple: ranks that meet in a collective for every microbatch must have equally many.
        count = min(-(-fewest // replicas) * replicas, len(lengths))
        order, widths = self._sort_by_length(lengths)
        rectangles = self._split_into(widths, count)
        shares = deal_to_replicas([rows * widths[start] for start, rows in rectangles], replicas)
        microbatches = [order[start : start + rows] for start, rows in rectangles]
        return [[microbatches[number] for number in share] for share in shares]

    def make_microbatches(self, replicas: Sequence[Lengths]) -> list[list[list[int]]]:
        """Make each replica's microbatches, largest first, as `SequencePacker.make_microbatches` does."""
        count = max(map(self.count_microbatches, replicas))
        return [self.make_replica_microbatches(lengths, count) for lengths in replicas]

    def make_replica_microbatches(self, lengths: Lengths, microbatches: int) -> list[list[int]]:
        """Make `microbatches` of one replica, or one per sequence."""
        order, widths = self._sort_by_length(lengths)
        rectangles = self._split_into(widths, min(microbatches, len(widths)))
        return [order[start : start + rows] for start, rows in rectangles]

    def count_microbatches(self, lengths: Lengths) -> int:
        """Count the fewest rectangles that the sequences fit into."""
        return len(_cut(self._sort_by_length(lengths)[1], self.microbatch_tokens))

    def _sort_by_length(self, lengths: Lengths) -> tuple[list[int], list[int]]:
        tokens = np.asarray(lengths).tolist()
        order = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)
        return order, [-(-max(tokens[index], 1) // self.multiple) * self.multiple for index in order]

    def _split_into(self, widths: list[int], microbatches: int) -> list[tuple[int, int]]:
        """Split length-sorted sequences into exactly `microbatches` rectangles, largest first."""
        # Binary search: a larger area never needs more rectangles, because each then reaches at least as far.
        areas = range(1, self.microbatch_tokens)
        smallest = 1 + bisect_left(areas, True, key=lambda area: len(_cut(widths, area)) <= microbatches)
        # While there are too few rectangles, the largest one of several sequences (of equal ones, the first) is halved.
        parts = _cut(widths, smallest)
        singles: list[tuple[int, int]] = []
        heap: list[tuple[int, int, int]] = []
        while True:
            for start, rows in parts:
                if rows == 1:
                    singles.append((start, 1))
                else:
                    heapq.heappush(heap, (-rows * widths[start], start, rows))
            if len(singles) + len(heap) >= microbatches:
                break
            _, start, rows = heapq.heappop(heap)
            parts = [(start, rows // 2), (start + rows // 2, rows - rows // 2)]
        rectangles = singles + [(start, rows) for _, start, rows in heap]
        return sorted(rectangles, key=lambda rectangle: (-rectangle[1] * widths[rectangle[0]], rectangle[0]))


def _cut(widths: list[int], area: int) -> list[tuple[int, int]]:
    """Cut length-sorted sequences into rectangles: index of the first, number of sequences."""
    rectangles: list[tuple[int, int]] = []
    start = 0
    while start < len(widths):
        rows = min(max(area // widths[start], 1), len(widths) - start)
        rectangles.append((start, rows))
        start += rows
    return rectangles


def deal_to_replicas(costs: Sequence[float], replicas: int) -> list[list[int]]:
    """Deal microbatches to replicas, equally many as far as possible, balancing costs."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    heap = [(0.0, replica) for replica in range(replicas)]
    for number, cost in enumerate(costs):
        load, replica = heapq.heappop(heap)
        shares[replica].append(number)
        if len(shares[replica]) < -(-len(costs) // replicas):
            heapq.heappush(heap, (load + cost, replica))
    return shares


def make_packer(
    config: PolicyConfig, cost: Cost, microbatch_tokens: int | None = None
) -> SequencePacker | SequencePadder:
    """Make the packer that policy.packing asks for; `microbatch_tokens` replaces policy.microbatch_tokens."""
    tokens = microbatch_tokens or config.microbatch_tokens
    if config.packing:
        return SequencePacker(tokens, config.parallel.chunk_multiple, cost)
    return SequencePadder(tokens, config.parallel.sequence_multiple)
