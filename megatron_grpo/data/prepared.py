"""What is known of the prompts that recipes have made before the run, so that they can be checked before they exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """Files of prompts that megatron_grpo.prepare makes."""

    rows: dict[str, int]
    """Number of rows by name of the file."""
    columns: tuple[str, ...]
    task: str
    """task_name of every row."""
    prompt_tokens: int
    """Tokens of every prompt, without a chat template; the tokenizer has none."""


_ADDITION = PreparedPrompts(
    rows={"train.jsonl": 4588, "val.jsonl": 512},
    columns=("prompt", "answer", "task_name"),
    task="addition",
    prompt_tokens=6,
)

PREPARED_PROMPTS = {"addition": _ADDITION, "addition_moe": _ADDITION}
"""The prompts that each prepare.name makes."""
