"""What is known of the prompts that recipes have made before the run, so that they can be checked before they exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """Files of prompts that megatron_grpo.prepare makes."""

    rows: dict[str, int]
    """Number of rows by name of the file."""
    columns: tuple[str, ...]
    tasks: tuple[str, ...]
    """Every task_name that rows have."""
    prompt_tokens: int
    """Tokens of the longest prompt, without a chat template; the tokenizer has none."""


_ADDITION = PreparedPrompts(
    rows={"train.jsonl": 4588, "val.jsonl": 512},
    columns=("prompt", "answer", "task_name"),
    tasks=("addition",),
    prompt_tokens=6,
)

_CALCULATOR = PreparedPrompts(
    rows={"train.jsonl": 3495, "val.jsonl": 256},
    columns=("prompt", "answer", "task_name"),
    tasks=("tools",),
    prompt_tokens=6,
)

_TWO_TASKS = PreparedPrompts(
    rows={"train.jsonl": 2550, "val.jsonl": 512},
    columns=("prompt", "answer", "task_name"),
    tasks=("addition", "countdown"),
    prompt_tokens=9,
)

PREPARED_PROMPTS = {
    "addition": _ADDITION,
    "addition_moe": _ADDITION,
    "calculator": _CALCULATOR,
    "two_tasks": _TWO_TASKS,
}
"""The prompts that each prepare.name makes."""
