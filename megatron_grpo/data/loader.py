"""Prompts of one step after the other, in an order that a resumed run continues exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.data.processors import DatumSpec


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


class Prompts(Protocol):
    """A dataset of prompts, for example AllTaskProcessedDataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int, /) -> DatumSpec: ...


class PromptLoader:
    """Batches of prompts, epoch after epoch. Prompts flagged as too long (loss_multiplier 0) are left out and counted.

    Each `iter()` yields the rest of the current epoch and then moves on to the next one::

        while loader.epoch < max_epochs:
            for prompts in loader:
                ...

    A position may name rows that were given before it and are to be given once more; those come first
    (`waiting_batches`, and what does not fill a batch of them with the next `iter()`).
    """

    def __init__(self, dataset: Prompts, *, prompts_per_batch: int, order: Visits) -> None:
        """
        Args:
            dataset: the prompts.
            prompts_per_batch: prompts that are not left out in each batch; those at the end of an epoch that do not
                fill one are dropped.
            order: numbers of the prompts that an epoch visits; the loader sets its epoch.
        """
        self.prompts_per_batch = prompts_per_batch
        self.epoch = 0
        """Epochs completed."""
        self.left_out = 0
        """Rows of the current epoch (after its end: of the last one) left out so far because they are too long."""
        self._dataset = dataset
        self._rows = len(order)
        self._batches = 0
        self._waiting: list[int] = []
        """Rows that come before those at the position."""
        self._order = order
        # No automatic batching: rows come one by one, so the loader's position is exact whatever is left out.
        self._loader: StatefulDataLoader[DatumSpec] = StatefulDataLoader(
            dataset,
            batch_size=None,
            sampler=self._order,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else it draws from the process's global generator
        )

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """
        Raises:
            RunError: a row makes no prompt, or a whole epoch has too few prompts for a single batch.
        """
        self._order.epoch = self.epoch
        rows = iter(self._loader)
        if self._batches == 0:
            self.left_out = 0
        batch = self._first_waiting(len(self._waiting))
        for datum in _prompts(rows):
            if datum["loss_multiplier"] == 0:
                self.left_out += 1
                continue
            batch.append(datum)
            if len(batch) == self.prompts_per_batch:
                self._batches += 1
                yield batch
                batch = []
        if self._batches == 0:
            raise RunError(
                f"not one batch of {self.prompts_per_batch} prompts: the data has {self._rows} rows, of which "
                f"{self.left_out} are left out because they are too long"
            )
        self.epoch += 1
        self._batches = 0

    def waiting_batches(self) -> Iterator[list[DatumSpec]]:
        """Whole batches of the rows that were given before this position and are to be given once more."""
        while len(self._waiting) >= self.prompts_per_batch:
            yield self._first_waiting(self.prompts_per_batch)

    def _first_waiting(self, number: int) -> list[DatumSpec]:
        rows, self._waiting = self._waiting[:number], self._waiting[number:]
        return [self._dataset[row] for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded; JSON-serialisable."""
        return {
            "epoch": self.epoch,
            "left_out": self.left_out,
            "batches": self._batches,
            "rows": self._rows,
            "waiting": list(self._waiting),
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            ConfigError: the state is that of a dataset with another number of rows.
        """
        if state["rows"] != self._rows:
            text = f"has {self._rows} rows, and had {state['rows']} when the checkpoint was written"
            raise ConfigError([Problem("data.train_path", text)])
        self.epoch = state["epoch"]
        self.left_out = state["left_out"]
        self._batches = state["batches"]
        self._waiting = list(state.get("waiting", []))  # earlier versions have none
        self._order.epoch = self.epoch
        self._loader.load_state_dict(state["loader"])


def _prompts(rows: Iterator[DatumSpec]) -> Iterator[DatumSpec]:
    """The prompts of an iterator over a dataset.

    Raises:
        RunError: a row makes none, which is found only now that its turn has come.
    """
    try:
        yield from rows
    except ValueError as error:
        raise RunError(f"{error}; data.bad_rows=skip leaves such rows out") from error


def with_waiting(state: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The position of a loader from which these rows are given first, before everything that comes after it."""
    return {**copy.deepcopy(state), "waiting": [*rows, *state["waiting"]]}


def _as_it_is(datum: DatumSpec) -> DatumSpec:
    return datum


class Batches(Protocol):
    """A loader: `PromptLoader`, or one of a stream."""

    epoch: int
    left_out: int
    prompts_per_batch: int

    def __iter__(self) -> Iterator[list[DatumSpec]]: ...

    def waiting_batches(self) -> Iterator[list[DatumSpec]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def prompt_batches(loader: Batches, max_num_epochs: int) -> Iterator[list[DatumSpec]]:
    """Batches of prompts from where the loader stands to the end of the last epoch."""
    yield from loader.waiting_batches()
    while loader.epoch < max_num_epochs:
        yield from loader
