"""A dataset of rows, processed into prompts one by one as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.interfaces import DataProcessor, DatumSpec, TaskDataSpec, task_of
from megatron_grpo.data.own_processors import in_our_form
from megatron_grpo.data.row_forms import rendering_of
from megatron_grpo.data.sources import Source


class Rows(Protocol):
    """Anything indexed by row number: a list of dicts, a Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int, /) -> dict[str, Any]: ...


class UsableRows:
    """The rows of a source that can be used, numbered through."""

    def __init__(self, source: Source, usable: NDArray[np.int64]) -> None:
        """
        Args:
            source: all rows.
            usable: [usable rows], int64: their numbers in the source.
        """
        self._source, self._usable = source, usable

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, idx: int, /) -> dict[str, Any]:
        return self._source[int(self._usable[idx])]

    def place(self, idx: int) -> str:
        """Where a row is, for people."""
        return self._source.place(int(self._usable[idx]))


class AllTaskProcessedDataset:
    """Rows of any mix of tasks as prompts; each row's task_name chooses its processor."""

    def __init__(
        self,
        dataset: Rows,
        tokenizer: Any,
        default_task_data_spec: TaskDataSpec,
        task_data_processors: Mapping[str, tuple[TaskDataSpec, DataProcessor]],
        max_seq_length: int,
        *,
        skip_refused: bool = False,
    ) -> None:
        """
        Args:
            dataset: the rows.
            tokenizer: a Hugging Face tokenizer.
            default_task_data_spec: its task_name is that of rows without one.
            task_data_processors: specification and processor by task name.
            max_seq_length: prompts of more tokens are flagged with loss_multiplier 0.
            skip_refused: whether a row that its processor refuses is flagged with loss_multiplier 0, too.
        """
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors = task_data_processors
        self.max_seq_length = max_seq_length
        self.skip_refused = skip_refused
        self.refused: dict[int, str] = {}
        """Why each row was refused that was, by its number."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        """
        Raises:
            ValueError: the row makes no prompt, and is not to be left out.
            IndexError: there is no such row.
        """
        try:
            return self.prompt(self.dataset[idx], idx)
        except ValueError as error:
            place = self.dataset.place(idx) if isinstance(self.dataset, UsableRows) else None
            reason = str(error) if place is None else f"{place}: {error}"
            if not self.skip_refused:
                raise ValueError(reason) from error
            self.refused[idx] = reason
            return _left_out(idx, self.default_task_data_spec.task_name)

    def prompt(self, row: dict[str, Any], idx: int) -> DatumSpec:
        """The prompt of a row that need not be in the dataset.

        Args:
            row: the row.
            idx: the number that the prompt is known by.

        Raises:
            ValueError: nothing processes the row's task, or its processor refuses it, fails, or returns no prompt.
        """
        task = task_of(row, self.default_task_data_spec.task_name)
        try:
            spec, process = self.task_data_processors[task]
        except (KeyError, TypeError):
            known = ", ".join(sorted(self.task_data_processors)) or "none"
            raise ValueError(f'row {idx}: no data processor for task_name "{task}"; there is {known}') from None
        name = f"row {idx}: its processor {_name_of(process)}"
        ours = rendering_of(process) is not None
        try:
            given = process(row, spec, self.tokenizer, self.max_seq_length, idx)
        except Exception as error:  # whatever a user's own processor raises
            if ours and isinstance(error, ValueError):
                raise
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise ValueError(f"{name} raised {reason}") from error
        if ours:
            return given
        try:
            return in_our_form(given, row, spec, task=task, tasks=self.task_data_processors, idx=idx)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error


def _name_of(process: DataProcessor) -> str:
    """A user's own processor by its import path, as far as it has one."""
    named = process if hasattr(process, "__qualname__") else type(process)
    return f"{named.__module__}.{named.__qualname__}"


def _left_out(idx: int, task: str) -> DatumSpec:
    """What stands for a row that makes no prompt."""
    return DatumSpec(
        message_log=[], length=0, extra_env_info={}, loss_multiplier=0.0, idx=idx, task_name=task, prompt=""
    )
