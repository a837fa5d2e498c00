"""Training prompts that are read from the hub as they are needed, in an order that a resumed run continues exactly."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.examine import row_check
from megatron_grpo.data.interfaces import DatumSpec


def open_stream(config: DatasetConfig) -> Iterable[dict[str, Any]]:
    """The rows of a hub set, which nothing stores.

    Raises:
        ValueError: it cannot be opened; says why.
    """
    from datasets import load_dataset

    try:
        stream: Iterable[dict[str, Any]] = load_dataset(config.path, config.subset, split=config.split, streaming=True)
        next(iter(stream), None)
    except Exception as error:  # of the hub, of its HTTP library, of whichever builder reads the files
        raise ValueError(f"cannot be opened: {str(error).strip().partition(chr(10))[0]}") from error
    return stream


class StreamLoader:
    """Batches of prompts like PromptLoader's, of rows that come one after the other.

    Rows are shuffled within a buffer: each time one is drawn from it, the next of the stream takes its place. What is
    drawn follows from seed and epoch, so that a resumed run reads the stream from its beginning up to where it was.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        *,
        config: DatasetConfig,
        data: DataConfig,
        environments: Mapping[str, str],
        process: AllTaskProcessedDataset,
        prompts_per_batch: int,
        seed: int,
    ) -> None:
        """
        Args:
            rows: the stream; iterating it again begins again.
            config: which set it is, for messages.
            data: shuffling, and what becomes of bad rows.
            environments: type of each environment, by task name.
            process: makes prompts of rows.
            prompts_per_batch: prompts of each batch; those at the end of an epoch that do not fill one are dropped.
            seed: decides which row is drawn from the buffer.
        """
        self.epoch = 0
        """Epochs completed."""
        self.left_out = 0
        """Rows of the current epoch (after its end: of the last one) left out so far."""
        self._rows, self._config, self._data = rows, config, data
        self._check = row_check(config, data, environments)
        self._process, self.prompts_per_batch, self._seed = process, prompts_per_batch, seed
        self._drawn = 0

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """
        Raises:
            RunError: a row cannot be used and data.bad_rows=fail, or a whole epoch has too few prompts for a batch.
        """
        if self._drawn == 0:
            self.left_out = 0
        first, batch = self._drawn == 0, list[DatumSpec]()
        for drawn, (number, row) in enumerate(self._order(), start=1):
            if drawn <= self._drawn:
                continue
            prompt = self._prompt(number, row)
            if prompt is not None:
                batch.append(prompt)
            if len(batch) == self.prompts_per_batch:
                self._drawn, first = drawn, False
                yield batch
                batch = []
        if first:
            raise RunError(
                f"not one batch of {self.prompts_per_batch} prompts in {self._config.path}: {self.left_out} were left "
                "out"
            )
        self.epoch += 1
        self._drawn = 0

    def waiting_batches(self) -> Iterator[list[DatumSpec]]:
        """None: what a stream gave is not given once more."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded; JSON-serialisable."""
        return {"epoch": self.epoch, "left_out": self.left_out, "drawn": self._drawn, "stream": self._config.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            ConfigError: the state is that of another set, or of one that was not streamed.
        """
        if state.get("stream") != self._config.path:
            raise ConfigError([Problem("data.streaming=True", "the checkpoint was written by a run with other data")])
        self.epoch, self.left_out, self._drawn = state["epoch"], state["left_out"], state["drawn"]

    def _order(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and content of the rows of this epoch, in the order in which they are drawn."""
        numbered = enumerate(iter(self._rows))
        if not self._data.shuffle:
            yield from numbered
            return
        draw = random.Random(f"{self._seed} {self.epoch}")
        buffer: list[tuple[int, dict[str, Any]]] = []
        for one in numbered:
            if len(buffer) < self._data.shuffle_buffer:
                buffer.append(one)
                continue
            place = draw.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = one
        draw.shuffle(buffer)
        yield from buffer

    def _prompt(self, number: int, row: dict[str, Any]) -> DatumSpec | None:
        """The prompt of a row; None: it is left out, and counted."""
        formed, prompt, reason = self._check.in_form(row), None, ""
        if isinstance(formed, str):
            reason = f"row {number}: the row {formed}"
        else:
            try:
                prompt = self._process.prompt(row, number)
            except ValueError as error:
                reason = str(error)
        if reason and self._data.bad_rows == "fail":
            raise RunError(f"{self._config.path}, {reason}; data.bad_rows=skip leaves it out")
        if prompt is None or prompt["loss_multiplier"] == 0:
            self.left_out += 1
            return None
        return prompt
