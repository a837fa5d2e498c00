"""Loaders: batches of training prompts in an order that a resumed run continues exactly."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError, select_first_line
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.rows import RowCheck, digest_rows
from megatron_grpo.data.table_values import StreamedRows

Prompts = Dataset[DatumSpec]


class PromptSampler(Sampler[int]):
    """Row numbers of an epoch, in order or shuffled by (seed, epoch).

    The rows of several sets are numbered consecutively. `sizes`: rows of each set; `weights`: visits of each row in
    an epoch. With weight 2.25 an epoch visits every row twice and a quarter of the rows a third time; four epochs
    visit all rows equally often.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, shuffle: bool, seed: int) -> None:
        self.sizes, self.weights = list(sizes), list(weights)
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0

    def __len__(self) -> int:
        full_visits = sum(int(weight) * size for size, weight in zip(self.sizes, self.weights, strict=True))
        return full_visits + sum(map(self._count_extra_rows, range(len(self.sizes))))

    def __iter__(self) -> Iterator[int]:
        begin, visits = 0, list[int]()
        for number, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            visits += [*range(begin, begin + size)] * int(weight)
            if count := self._count_extra_rows(number):
                # The order of a set's extra rows is fixed for the run, and each epoch takes the next rows of it, so
                # that the visits of all rows differ by at most one.
                generator = torch.Generator().manual_seed(self.seed ^ ((number + 1) << 40))
                order = torch.randperm(size, generator=generator).tolist()
                visits += [begin + order[(self.epoch * count + index) % size] for index in range(count)]
            begin += size
        if not self.shuffle:
            return iter(visits)
        # Two rounds of seeding keep (seed, epoch) and (seed + 1, epoch - 1) apart.
        epoch_seed = int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(self.seed))) ^ self.epoch
        order = torch.randperm(len(visits), generator=torch.Generator().manual_seed(epoch_seed)).tolist()
        return iter(order if visits == [*range(len(visits))] else [visits[index] for index in order])

    def _count_extra_rows(self, number: int) -> int:
        return round((self.weights[number] % 1) * self.sizes[number])


class BatchLoader(Protocol):
    """A loader of training prompts."""

    epoch: int = 0  # completed epochs
    left_out: int = 0
    """Rows of the current epoch, or of the last after its end, that were left out, for example as too long."""
    prompts_per_batch: int

    def __iter__(self) -> Iterator[list[DatumSpec]]: ...

    def load_waiting_batches(self) -> Iterator[list[DatumSpec]]:
        """Yield batches of rows that have to be loaded again."""
        return iter(())

    def observe(self, outcomes: Sequence[Outcome]) -> str | None:
        """Learn from a step's outcomes which prompts to load; returns a remark."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last yielded batch; JSON-serialisable."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; ConfigError: of other data."""


class PromptLoader(BatchLoader):
    """Batches of usable prompts, epoch after epoch.

    Each `iter()` yields the rest of the current epoch and then moves on to the next (`iterate_batches`); a remainder of
    prompts at its end is dropped. A resumed run continues with the next prompt, without reading the earlier ones: the
    order of an epoch follows from (seed, epoch) alone, so the position is a number of rows in that order, which the
    stateful loader of torchdata keeps. Prompts may also be drawn ahead of training: rows whose samples were not trained
    on before a checkpoint are kept in the position as `waiting` and come first (`load_waiting_batches`; a remainder
    that fills no batch comes with the next `iter()`).
    """

    def __init__(self, dataset: Prompts, *, prompts_per_batch: int, order: PromptSampler) -> None:
        self.prompts_per_batch = prompts_per_batch
        self._dataset = dataset
        self._rows = len(order)
        self._batches = 0
        self._waiting: list[int] = []  # rows before the position that have to be loaded again
        self._order = order
        # No automatic batching, so that the position is exact: were rows loaded in batches, a row that is left out
        # would be replaced from the next batch, and the position would lie within a batch.
        self._loader: StatefulDataLoader[DatumSpec] = StatefulDataLoader(
            dataset,
            batch_size=None,
            sampler=self._order,
            collate_fn=lambda datum: datum,
            generator=torch.Generator(),  # else it draws from the process's global generator
        )

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """Yield the batches of the rest of the epoch, then begin the next.

        RunError: no prompt can be made of a row, or a whole epoch has too few prompts for a single batch.
        """
        self._order.epoch = self.epoch  # first: the loader draws the order of the whole epoch when it is iterated
        rows = iter(self._loader)
        if self._batches == 0:
            self.left_out = 0
        with _report_refused_rows():
            batch, self._waiting = self.load_prompts(self._waiting), []
            for datum in rows:
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
                f"{self.left_out} are left out as too long or refused"
            )
        self.epoch += 1
        self._batches = 0

    def load_waiting_batches(self) -> Iterator[list[DatumSpec]]:
        """Yield batches of waiting rows; RunError: a row makes no prompt."""
        with _report_refused_rows():
            # A processor that was changed before the resume may refuse rows, which data.bad_rows=skip leaves out.
            self._waiting = [row for row in self._waiting if self._dataset[row]["loss_multiplier"]]
            while len(self._waiting) >= self.prompts_per_batch:
                rows, self._waiting = self._waiting[: self.prompts_per_batch], self._waiting[self.prompts_per_batch :]
                yield self.load_prompts(rows)

    def load_prompts(self, rows: Sequence[int]) -> list[DatumSpec]:
        """Load rows without moving the position; ValueError: one makes no prompt."""
        return [self._dataset[row] for row in rows]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "left_out": self.left_out,
            "batches": self._batches,
            "rows": self._rows,
            "waiting": list(self._waiting),
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rows"] != self._rows:
            text = f"has {self._rows} rows, and had {state['rows']} when the checkpoint was written"
            raise ConfigError([Problem("data.train_path", text)])
        self.epoch, self.left_out, self._batches = state["epoch"], state["left_out"], state["batches"]
        self._waiting = list(state["waiting"])
        self._order.epoch = self.epoch
        self._loader.load_state_dict(state["loader"])


@contextmanager
def _report_refused_rows() -> Iterator[None]:
    """Turn the error of a row without a prompt into a RunError."""
    try:
        yield
    except ValueError as error:  # it shows only when the row's processor runs
        raise RunError(f"{error}; data.bad_rows=skip leaves such rows out") from error


def add_waiting(state: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Add rows, which a loader loads again first, to its state."""
    return {**copy.deepcopy(state), "waiting": [*rows, *state["waiting"]]}


def open_stream(config: DatasetConfig) -> Iterable[dict[str, Any]]:
    """Open a hub set as a stream; ValueError: it cannot be opened."""
    from datasets import load_dataset

    try:
        stream = StreamedRows(load_dataset(config.path, config.subset, split=config.split, streaming=True))
        # A stream opens no file before its first row, and a missing file should fail here rather than in training.
        next(iter(stream), None)
    except Exception as error:  # raised by the hub, its HTTP library or the builder that reads the files
        raise ValueError(f"cannot be opened: {select_first_line(error)}") from error
    return stream


class StreamLoader(BatchLoader):
    """Batches of prompts like PromptLoader's, from a stream of rows.

    Rows are shuffled within a buffer: the next row of the stream replaces each row that is drawn. `prompts` turns rows
    into prompts with its processors; its own rows are not used.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        *,
        config: DatasetConfig,
        data: DataConfig,
        environments: Mapping[str, str],
        prompts: AllTaskProcessedDataset,
        prompts_per_batch: int,
        seed: int,
    ) -> None:
        self._rows, self._config, self._data = rows, config, data
        self._check = RowCheck(config, data, environments)
        self._prompts, self.prompts_per_batch, self._seed = prompts, prompts_per_batch, seed
        self._drawn = 0
        self._first_rows_digest: str | None = None  # None before they are read

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """Yield the batches of the rest of the epoch, then begin the next.

        RunError: a row cannot be used and data.bad_rows=fail, or a whole epoch has too few prompts for a batch.
        """
        if self._drawn == 0:
            self.left_out = 0
        is_empty, batch = self._drawn == 0, list[DatumSpec]()
        for drawn, (number, row) in enumerate(self._draw_rows(), start=1):
            if drawn <= self._drawn:
                continue  # earlier rows are drawn again: the buffer's content follows from all of them
            prompt = self._make_prompt(number, row)
            if prompt is not None:
                batch.append(prompt)
            if len(batch) == self.prompts_per_batch:
                self._drawn, is_empty = drawn, False
                yield batch
                batch = []
        if is_empty:
            text = f"not one batch of {self.prompts_per_batch} prompts in {self._config.path}"
            raise RunError(f"{text}: {self.left_out} were left out")
        self.epoch += 1
        self._drawn = 0

    def state_dict(self) -> dict[str, Any]:
        position = {"epoch": self.epoch, "left_out": self.left_out, "drawn": self._drawn}
        return {**position, "stream": self._config.path, **self._identify()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        text = "the checkpoint was written by a run with other data"
        if state.get("stream") != self._config.path:
            raise ConfigError([Problem("data.streaming=True", text)])
        for name, value in self._identify().items():
            if state.get(name, value) != value:  # checkpoints of earlier versions have no such names
                reason = "its first rows differ" if name == "beginning" else f"its {name} was {state[name]}"
                raise ConfigError([Problem(f"data.train_path={self._config.path}", f"{text}: {reason}")])
        self.epoch, self.left_out, self._drawn = state["epoch"], state["left_out"], state["drawn"]

    def _identify(self) -> dict[str, Any]:
        # The digest of the first rows tells a stream that changed from that of the checkpoint; all may be too many.
        if self._first_rows_digest is None:
            self._first_rows_digest = digest_rows(islice(self._rows, 100))
        return {"subset": self._config.subset, "split": self._config.split, "beginning": self._first_rows_digest}

    def _draw_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        numbered = enumerate(iter(self._rows))
        if not self._data.shuffle:
            yield from numbered
            return
        draw = random.Random(f"{self._seed} {self.epoch}")
        buffer: list[tuple[int, dict[str, Any]]] = []
        for numbered_row in numbered:
            if len(buffer) < self._data.shuffle_buffer:
                buffer.append(numbered_row)
                continue
            index = draw.randrange(len(buffer))
            yield buffer[index]
            buffer[index] = numbered_row
        # The stream has ended, and no rows come in for those that are drawn.
        draw.shuffle(buffer)
        yield from buffer

    def _make_prompt(self, number: int, row: dict[str, Any]) -> DatumSpec | None:
        converted, prompt, reason = self._check.convert(row), None, ""
        if isinstance(converted, str):
            reason = f"row {number}: the row {converted}"
        else:
            try:
                prompt = self._prompts.make_prompt(row, number)
            except ValueError as error:
                reason = str(error)
        if reason and self._data.bad_rows == "fail":
            raise RunError(f"{self._config.path}, {reason}; data.bad_rows=skip leaves it out")
        if prompt is None or prompt["loss_multiplier"] == 0:
            self.left_out += 1
            return None
        return prompt


def iterate_batches(loader: BatchLoader, max_num_epochs: int) -> Iterator[list[DatumSpec]]:
    """Yield the batches from the position to the last epoch."""
    yield from loader.load_waiting_batches()
    while loader.epoch < max_num_epochs:
        yield from loader
