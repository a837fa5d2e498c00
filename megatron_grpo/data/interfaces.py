"""The common form of a training example, whatever file and task it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

REFERENCE = "<reference>"
"""Key of the reference answer, as text, among what the environment needs; no column of a file is called that."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str
    token_ids: list[int]
    """The turn as the model sees it, chat-template markup included."""


class DatumSpec(TypedDict):
    """One prompt, ready to be sampled from."""

    message_log: list[Message]
    length: int
    """Tokens of all messages together."""
    extra_env_info: dict[str, Any]
    """What the environment needs: the row's columns, and REFERENCE."""
    loss_multiplier: float
    """1, or 0 for a prompt that is left out."""
    idx: int
    """Row number in the dataset: the identity of the prompt in seeds, logs and dumps."""
    task_name: str
    prompt: str | list[dict[str, str]]
    """The row's prompt as it was given, for logs and reward functions."""


@dataclass(frozen=True, kw_only=True)
class TaskDataSpec:
    """How rows of one task become prompts."""

    task_name: str
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    apply_chat_template: bool = True
    system_prompt: str | None = None


DataProcessor = Callable[[dict[str, Any], TaskDataSpec, Any, int, int], DatumSpec]
"""(row, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec."""
