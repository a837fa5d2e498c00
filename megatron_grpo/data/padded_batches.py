"""Splitting a batch of sequences over data-parallel ranks and microbatches."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import neg
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """A run of the sequences in order of length: [start, start + count), as a rectangle of `width` columns."""

    start: int
    count: int
    width: int

    @property
    def area(self) -> int:
        """Tokens, padding included."""
        return self.count * self.width


def plan_microbatches(
    lengths: Sequence[int] | NDArray[np.integer],
    *,
    data_parallel: int,
    microbatch_tokens: int,
    pad_to_multiple: int = 1,
) -> list[list[list[int]]]:
    """Put sequences of like length into the same microbatch, and microbatches of like size onto each rank.

    A microbatch becomes a rectangle as wide as its longest sequence, rounded up to `pad_to_multiple`. The plan takes
    the fewest microbatches that fit and can be shared out evenly, cuts the sequences in order of length so that the
    largest rectangle is as small as can be, and gives the rectangles, largest first, to the rank with the least to do.

    Takes O(n log n) time for n sequences: a few microseconds for each.

    Args:
        lengths: [sequences], integers: tokens of each sequence.
        data_parallel: data-parallel ranks, each of which gets as many microbatches as every other.
        microbatch_tokens: most tokens of a rectangle; a sequence that is longer alone gets one of its own.
        pad_to_multiple: columns that widths of rectangles are multiples of.

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
    fewest = _count(widths, microbatch_tokens)
    # Rounded up to a multiple: ranks that meet in a collective for every microbatch must have equally many.
    microbatches = math.ceil(fewest / data_parallel) * data_parallel
    if microbatches > len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences need {fewest} microbatches of {microbatch_tokens} tokens, which cannot be "
            f"shared out evenly over {data_parallel} data-parallel ranks; use a multiple of {data_parallel} sequences"
        )
    cut = _split_until(_cut(widths, _smallest_area(widths, microbatches, microbatch_tokens)), widths, microbatches)
    return [[order[m.start : m.start + m.count] for m in rank] for rank in _share_out(cut, data_parallel)]


def _stretches(widths: list[int], area: int) -> Iterator[tuple[int, int, int]]:
    """Fill rectangles of at most `area`, one after the other; a sequence that is wider gets its own.

    Rectangles of equally many sequences follow each other, so they are yielded together as (start, count, rectangles):
    `rectangles` of `count` sequences each, the first at `start`. The very last may lack sequences.

    `widths` must descend. Takes O(min(rectangles, sqrt(area)) * log(len(widths))) time, since no more than
    2 * sqrt(area) different counts are quotients of `area`.
    """
    start = 0
    while start < len(widths):
        count = max(area // widths[start], 1)
        # One sequence more fits from here on.
        end = bisect_left(widths, -(area // (count + 1)), lo=start, key=neg)
        rectangles = -(-(end - start) // count)
        yield start, count, rectangles
        start += rectangles * count


def _count(widths: list[int], area: int) -> int:
    """Number of rectangles that `_cut` makes."""
    return sum(rectangles for _, _, rectangles in _stretches(widths, area))


def _cut(widths: list[int], area: int) -> list[_Microbatch]:
    """Rectangles of at most `area`, in order of `start`; a sequence that is wider gets its own."""
    # Widths descend, so the first sequence of a rectangle is its widest; only the very last may lack sequences.
    return [
        _Microbatch(start, min(count, len(widths) - start), widths[start])
        for first, count, rectangles in _stretches(widths, area)
        for start in range(first, first + rectangles * count, count)
    ]


def _smallest_area(widths: list[int], microbatches: int, largest: int) -> int:
    """The least area with which `_cut` makes no more than `microbatches`; `largest` is known to do."""
    # Bisection: a larger area never needs more rectangles, because each then reaches at least as far.
    low, high = 1, largest
    while low < high:
        middle = (low + high) // 2
        if _count(widths, middle) <= microbatches:
            high = middle
        else:
            low = middle + 1
    return low


def _split_until(cut: list[_Microbatch], widths: list[int], microbatches: int) -> list[_Microbatch]:
    """Halve the largest rectangle of more than one sequence, of equals the first, until there are `microbatches`.

    The result is in no particular order.
    """
    if len(cut) == microbatches:
        return cut
    done = [m for m in cut if m.count == 1]
    heap = [(-m.area, m.start, m) for m in cut if m.count > 1]  # starts differ: rectangles are never compared
    heapq.heapify(heap)
    while len(done) + len(heap) < microbatches:
        *_, largest = heapq.heappop(heap)
        half = largest.count // 2
        second = largest.start + half
        for part in (
            _Microbatch(largest.start, half, largest.width),
            _Microbatch(second, largest.count - half, widths[second]),
        ):
            if part.count > 1:
                heapq.heappush(heap, (-part.area, part.start, part))
            else:
                done.append(part)
    return done + [m for *_, m in heap]


def _share_out(cut: list[_Microbatch], ranks: int) -> list[list[_Microbatch]]:
    """Largest first, to the rank with the least area among those that still lack microbatches; of equals, the first."""
    shares: list[list[_Microbatch]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]  # a heap of (area, rank)
    for microbatch in sorted(cut, key=lambda m: (-m.area, m.start)):
        area, rank = open_ranks[0]
        shares[rank].append(microbatch)
        if len(shares[rank]) < len(cut) // ranks:
            heapq.heapreplace(open_ranks, (area + microbatch.area, rank))
        else:
            heapq.heappop(open_ranks)
    return shares


def plan_replica(
    lengths: Sequence[int] | NDArray[np.integer], *, microbatches: int, microbatch_tokens: int, pad_to_multiple: int = 1
) -> list[list[int]]:
    """The microbatches of one replica whose sequences are settled, largest first.

    Args:
        lengths: [sequences], integers: tokens of each sequence; at least one sequence.
        microbatches: how many there are to be; a replica with fewer sequences makes one of each.
        microbatch_tokens: most tokens of a rectangle; a sequence that is longer alone gets one of its own.
        pad_to_multiple: columns that widths of rectangles are multiples of.

    Returns:
        Indices into `lengths`, microbatch by microbatch.
    """
    order, widths = _by_length(lengths, pad_to_multiple)
    wanted = min(microbatches, len(widths))
    cut = _split_until(_cut(widths, _smallest_area(widths, wanted, microbatch_tokens)), widths, wanted)
    return [order[m.start : m.start + m.count] for m in _share_out(cut, 1)[0]]


def fewest_microbatches(
    lengths: Sequence[int] | NDArray[np.integer], *, microbatch_tokens: int, pad_to_multiple: int = 1
) -> int:
    """How many microbatches of at most `microbatch_tokens` sequences of these lengths need.

    Args:
        lengths: [sequences], integers: tokens of each sequence.
        microbatch_tokens: most tokens of a rectangle; a sequence that is longer alone gets one of its own.
        pad_to_multiple: columns that widths of rectangles are multiples of.
    """
    return _count(_by_length(lengths, pad_to_multiple)[1], microbatch_tokens)


def _by_length(lengths: Sequence[int] | NDArray[np.integer], pad_to_multiple: int) -> tuple[list[int], list[int]]:
    """[sequences], integers, to the indices of the sequences, longest first, and the padded width of each.

    Sequences of equal length stay in their order.
    """
    tokens = lengths if isinstance(lengths, Sequence) else lengths.tolist()
    order = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)  # stable: equals by index
    rounded_up = {length: math.ceil(max(length, 1) / pad_to_multiple) * pad_to_multiple for length in set(tokens)}
    return order, [rounded_up[tokens[i]] for i in order]
