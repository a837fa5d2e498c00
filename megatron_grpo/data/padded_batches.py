"""The plan of a padded batch: sequences split over data-parallel ranks and rectangular microbatches."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def plan_microbatches(
    lengths: Sequence[int] | NDArray[np.integer],
    *,
    data_parallel: int,
    microbatch_tokens: int,
    pad_to_multiple: int = 1,
) -> list[list[list[int]]]:
    """Put sequences of similar length into the same microbatch, and equally much work onto each rank.

    A microbatch becomes a rectangle as wide as its longest sequence, rounded up to `pad_to_multiple`. The plan takes
    the fewest microbatches that fit and can be shared out evenly, cuts the sequences in order of length so that the
    largest rectangle is as small as possible, and gives each rectangle, largest first, to the rank with the least work.

    Takes O(n log n) time for n sequences: a few microseconds for each.

    Args:
        lengths: [sequences], integers: tokens of each sequence.
        data_parallel: data-parallel ranks, each of which gets as many microbatches as every other.
        microbatch_tokens: most tokens of a rectangle; a sequence that is longer alone gets one of its own.
        pad_to_multiple: number of columns of which the width of every rectangle is a multiple.

    Returns:
        For each rank its microbatches, each a list of indices into `lengths`. Every sequence is in exactly one; ranks
        have equally many microbatches, none empty. Equal arguments give equal plans.

    Raises:
        ValueError: the sequences cannot give all ranks equally many microbatches. Any multiple of `data_parallel`
            sequences can.
    """
    if len(lengths) < max(data_parallel, 1):
        raise ValueError(f"{len(lengths)} sequences do not give each of {data_parallel} data-parallel ranks one")
    order, widths = _by_length(lengths, pad_to_multiple)
    fewest = len(_cut(widths, microbatch_tokens))
    # Rounded up to a multiple: ranks that meet in a collective for every microbatch must have equally many.
    microbatches = -(-fewest // data_parallel) * data_parallel
    if microbatches > len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences need {fewest} microbatches of {microbatch_tokens} tokens, which cannot be "
            f"shared out evenly over {data_parallel} data-parallel ranks; use a multiple of {data_parallel} sequences"
        )
    rectangles = _rectangles(widths, microbatches, microbatch_tokens)
    shares = deal([count * widths[start] for start, count in rectangles], data_parallel)
    return [
        [order[start : start + count] for start, count in (rectangles[number] for number in share)] for share in shares
    ]


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal microbatches in their order, equally many to each rank.

    Each goes to the rank with the least cost so far among those that still lack microbatches; of equals, the first.

    Args:
        costs: cost of each microbatch; their number is a multiple of `ranks`.
        ranks: number of ranks.

    Returns:
        For each rank the numbers of its microbatches.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for number, cost in enumerate(costs):
        done, rank = heapq.heappop(heap)
        shares[rank].append(number)
        if len(shares[rank]) < len(costs) // ranks:
            heapq.heappush(heap, (done + cost, rank))
    return shares


def plan_replica(
    lengths: Sequence[int] | NDArray[np.integer], *, microbatches: int, microbatch_tokens: int, pad_to_multiple: int = 1
) -> list[list[int]]:
    """The microbatches of one replica whose sequences are fixed, as `plan_microbatches` makes them, largest first.

    Args:
        lengths: [sequences], integers: tokens of each sequence; at least one sequence.
        microbatches: number of microbatches; a replica with fewer sequences gets one for each sequence.
        microbatch_tokens: most tokens of a rectangle.
        pad_to_multiple: number of columns of which the width of every rectangle is a multiple.
    """
    order, widths = _by_length(lengths, pad_to_multiple)
    rectangles = _rectangles(widths, min(microbatches, len(widths)), microbatch_tokens)
    return [order[start : start + count] for start, count in rectangles]


def fewest_microbatches(
    lengths: Sequence[int] | NDArray[np.integer], *, microbatch_tokens: int, pad_to_multiple: int = 1
) -> int:
    """Number of microbatches that sequences of these lengths need; the arguments are those of `plan_replica`."""
    return len(_cut(_by_length(lengths, pad_to_multiple)[1], microbatch_tokens))


def _by_length(lengths: Sequence[int] | NDArray[np.integer], pad_to_multiple: int) -> tuple[list[int], list[int]]:
    """Indices of the sequences, longest first, and the padded width of each.

    Sequences of equal length stay in their order.
    """
    tokens = np.asarray(lengths).tolist()
    order = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)  # stable: equals by index
    return order, [-(-max(tokens[index], 1) // pad_to_multiple) * pad_to_multiple for index in order]


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


def _rectangles(widths: list[int], microbatches: int, largest: int) -> list[tuple[int, int]]:
    """Cut sequences into `microbatches` rectangles, as small as possible; the result is that of `_cut`, largest first.

    With the area `largest`, so many rectangles must suffice.
    """
    # Bisection: a larger area never needs more rectangles, because each then reaches at least as far.
    areas = range(1, largest)
    smallest = 1 + bisect_left(areas, True, key=lambda area: len(_cut(widths, area)) <= microbatches)
    # While there are too few, the largest rectangle of several sequences (of equal ones, the first) is halved.
    singles: list[tuple[int, int]] = []
    heap: list[tuple[int, int, int]] = []
    for start, count in _cut(widths, smallest):
        if count == 1:
            singles.append((start, 1))
        else:
            heap.append((-count * widths[start], start, count))
    heapq.heapify(heap)
    while len(singles) + len(heap) < microbatches:
        _, start, count = heapq.heappop(heap)
        half = count // 2
        for begin, part in ((start, half), (start + half, count - half)):
            if part == 1:
                singles.append((begin, 1))
            else:
                heapq.heappush(heap, (-part * widths[begin], begin, part))
    cut = singles + [(start, count) for _, start, count in heap]
    return sorted(cut, key=lambda one: (-one[1] * widths[one[0]], one[0]))
