"""Splitting a batch of sequences over data-parallel ranks and microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    lengths: list[int], *, data_parallel: int, microbatch_tokens: int, pad_to_multiple: int = 1
) -> list[list[list[int]]]:
    """Put sequences of like length into the same microbatch, and microbatches of like size onto each rank.

    A microbatch becomes a rectangle as wide as its longest sequence, rounded up to `pad_to_multiple`. The plan takes
    the fewest microbatches that fit and can be shared out evenly, cuts the sequences in order of length so that the
    largest rectangle is as small as can be, and gives the rectangles, largest first, to the rank with the least to do.

    Args:
        lengths: tokens of each sequence.
        data_parallel: ranks.
        microbatch_tokens: most tokens of a rectangle; a sequence that is longer alone gets one of its own.
        pad_to_multiple: widths are multiples of this.

    Returns:
        For each rank its microbatches, each a list of indices into `lengths`. Every sequence is in exactly one; every
        rank has the same number of microbatches, none empty. The same arguments give the same plan.

    Raises:
        ValueError: the sequences cannot give every rank the same number of microbatches. Any multiple of
            `data_parallel` sequences can.
    """
    if not lengths or len(lengths) < data_parallel:
        raise ValueError(f"{len(lengths)} sequences do not give each of {data_parallel} data-parallel ranks one")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    widths = [math.ceil(max(lengths[i], 1) / pad_to_multiple) * pad_to_multiple for i in order]
    fewest = len(_cut(widths, microbatch_tokens))
    microbatches = math.ceil(fewest / data_parallel) * data_parallel
    if microbatches > len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences need {fewest} microbatches of {microbatch_tokens} tokens, which cannot be "
            f"shared out evenly over {data_parallel} data-parallel ranks; use a multiple of {data_parallel} sequences"
        )
    cut = _split_until(_cut(widths, _smallest_area(widths, microbatches, microbatch_tokens)), widths, microbatches)
    return [[order[m.start : m.start + m.count] for m in rank] for rank in _share_out(cut, data_parallel)]


def _cut(widths: list[int], area: int) -> list[_Microbatch]:
    """Fill rectangles of at most `area`, one after the other; a sequence that is wider gets its own."""
    cut = []
    start = 0
    while start < len(widths):
        count = min(max(area // widths[start], 1), len(widths) - start)
        cut.append(_Microbatch(start, count, widths[start]))
        start += count
    return cut


def _smallest_area(widths: list[int], microbatches: int, largest: int) -> int:
    """The least area with which `_cut` needs no more than `microbatches`; `largest` is known to do."""
    low, high = 1, largest
    while low < high:
        middle = (low + high) // 2
        if len(_cut(widths, middle)) <= microbatches:
            high = middle
        else:
            low = middle + 1
    return low


def _split_until(cut: list[_Microbatch], widths: list[int], microbatches: int) -> list[_Microbatch]:
    """Halve the largest rectangle of more than one sequence until there are as many as wanted."""
    while len(cut) < microbatches:
        largest = max((m for m in cut if m.count > 1), key=lambda m: (m.area, -m.start))
        half = largest.count // 2
        second = largest.start + half
        cut.remove(largest)
        cut += [
            _Microbatch(largest.start, half, largest.width),
            _Microbatch(second, largest.count - half, widths[second]),
        ]
    return cut


def _share_out(cut: list[_Microbatch], ranks: int) -> list[list[_Microbatch]]:
    """Largest first, to the rank with the least area among those that still lack microbatches."""
    shares: list[list[_Microbatch]] = [[] for _ in range(ranks)]
    for microbatch in sorted(cut, key=lambda m: (-m.area, m.start)):
        open_ranks = [rank for rank in range(ranks) if len(shares[rank]) < len(cut) // ranks]
        least = min(open_ranks, key=lambda rank: (sum(m.area for m in shares[rank]), rank))
        shares[least].append(microbatch)
    return shares
