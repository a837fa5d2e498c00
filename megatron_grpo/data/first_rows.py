"""How many of a set's first rows make no prompt: what is found before training, many rows at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.interfaces import TaskDataSpec, task_of
from megatron_grpo.data.row_forms import rendering_of

BATCH_ROWS = 1000
"""Rows that are tokenised together, on all cores."""


def count_left_out(dataset: AllTaskProcessedDataset, rows: int) -> int:
    """How many of the first rows get a loss_multiplier of 0.

    Args:
        dataset: the prompts.
        rows: how many of them are looked at.

    Raises:
        ValueError: a row makes no prompt and is not to be left out; the message is the dataset's.
    """
    return sum(_of_part(dataset, range(begin, min(begin + BATCH_ROWS, rows))) for begin in range(0, rows, BATCH_ROWS))


def _of_part(dataset: AllTaskProcessedDataset, part: range) -> int:
    together = _together(dataset, part) if getattr(dataset.tokenizer, "is_fast", False) else None
    return sum(dataset[idx]["loss_multiplier"] == 0 for idx in part) if together is None else together


def _together(dataset: AllTaskProcessedDataset, part: range) -> int | None:
    """How many rows of a part are left out, their prompts tokenised together; None: some row may make no prompt."""
    texts: dict[str, list[str]] = defaultdict(list)
    for idx in part:
        row = dataset.dataset[idx]
        task = task_of(row, dataset.default_task_data_spec.task_name)
        try:
            spec, process = dataset.task_data_processors[task]
            render = rendering_of(process)
            if render is None:
                return None
            texts[task].append(render(row, spec, dataset.tokenizer, idx))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    counts = [
        _too_long(own, dataset.task_data_processors[task][0], dataset.tokenizer, dataset.max_seq_length)
        for task, own in texts.items()
    ]
    return None if None in counts else sum(count for count in counts if count is not None)


def _too_long(texts: list[str], spec: TaskDataSpec, tokenizer: Any, longest: int) -> int | None:
    """How many rendered prompts of a task are left out for their length; None: one has no tokens, or is refused."""
    found = tokenizer(
        texts,
        add_special_tokens=not spec.apply_chat_template,
        return_attention_mask=False,
        return_token_type_ids=False,
    )["input_ids"]
    too_long = sum(len(one) > longest for one in found)
    if not all(found) or (too_long and spec.long_prompts == "error"):
        return None
    return too_long if spec.long_prompts == "filter" else 0
