"""A dataset of rows, processed into prompts one by one as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_grpo.data.interfaces import DataProcessor, DatumSpec, TaskDataSpec


class Rows(Protocol):
    """Anything indexed by row number: a list of dicts, a Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int, /) -> dict[str, Any]: ...


class AllTaskProcessedDataset:
    """Rows of any mix of tasks as prompts; each row's task_name chooses its processor."""

    def __init__(
        self,
        dataset: Rows,
        tokenizer: Any,
        default_task_data_spec: TaskDataSpec,
        task_data_processors: Mapping[str, tuple[TaskDataSpec, DataProcessor]],
        max_seq_length: int,
    ) -> None:
        """
        Args:
            dataset: the rows.
            tokenizer: a Hugging Face tokenizer.
            default_task_data_spec: its task_name is that of rows without one.
            task_data_processors: specification and processor by task name.
            max_seq_length: prompts of more tokens are flagged with loss_multiplier 0.
        """
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors = task_data_processors
        self.max_seq_length = max_seq_length

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        """
        Raises:
            ValueError: nothing processes the row's task, or its loss_multiplier is neither 0 nor 1.
            IndexError: there is no such row.
        """
        row = self.dataset[idx]
        task = row.get("task_name", self.default_task_data_spec.task_name)
        try:
            spec, process = self.task_data_processors[task]
        except KeyError:
            known = ", ".join(sorted(self.task_data_processors)) or "none"
            raise ValueError(f'row {idx}: no data processor for task_name "{task}"; there is {known}') from None
        datum = process(row, spec, self.tokenizer, self.max_seq_length, idx)
        if datum["loss_multiplier"] not in (0, 1):
            given = datum["loss_multiplier"]
            raise ValueError(
                f"row {idx}: loss_multiplier={given:g}: a prompt is left out (0) or counts like others (1)"
            )
        return datum
