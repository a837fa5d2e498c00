"""In which order an epoch visits rows, from the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class Visits(Sampler[int]):
    """Row numbers of one epoch: as they come, or in an order drawn from (seed, epoch) alone.

    Of several sets, whose rows are numbered through, each row is visited `weight` times an epoch. What a weight has
    beyond a whole number is a part of the set, another one each epoch: after 1 / part epochs all rows had their turn.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, shuffle: bool, seed: int) -> None:
        """
        Args:
            sizes: rows of each set.
            weights: visits of each row of the set.
            shuffle: draw a new order each epoch.
            seed: decides the order of an epoch, and which rows are the part of a set that it visits.
        """
        self.sizes, self.weights = list(sizes), list(weights)
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0

    def __len__(self) -> int:
        return sum(int(weight) * size + self._part(number) for number, (size, weight) in enumerate(self._sets()))

    def __iter__(self) -> Iterator[int]:
        begin, visits = 0, list[int]()
        for number, (size, weight) in enumerate(self._sets()):
            visits += [*range(begin, begin + size)] * int(weight)
            visits += [begin + row for row in self._part_of_epoch(number)]
            begin += size
        if not self.shuffle:
            return iter(visits)
        # Two rounds of seeding keep (seed, epoch) and (seed + 1, epoch - 1) apart.
        epoch_seed = int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(self.seed))) ^ self.epoch
        order = torch.randperm(len(visits), generator=torch.Generator().manual_seed(epoch_seed)).tolist()
        return iter(order if visits == [*range(len(visits))] else [visits[place] for place in order])

    def _sets(self) -> list[tuple[int, float]]:
        return list(zip(self.sizes, self.weights, strict=True))

    def _part(self, number: int) -> int:
        """Rows of a set that are visited once more than others."""
        return round((self.weights[number] % 1) * self.sizes[number])

    def _part_of_epoch(self, number: int) -> list[int]:
        """Which rows of a set, numbered from 0, are visited once more than others in this epoch."""
        part, size = self._part(number), self.sizes[number]
        if part == 0:
            return []
        generator = torch.Generator().manual_seed(self.seed ^ (number + 1) << 40)
        order = torch.randperm(size, generator=generator).tolist()
        return [order[(self.epoch * part + place) % size] for place in range(part)]
