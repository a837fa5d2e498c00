"""The common form of a training example, whatever file and task it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

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
    dataset: NotRequired[str]
    """Name of the validation set that the prompt is of; absent where sets have no names."""


LongPrompts = Literal["filter", "cut_left", "error"]
"""What becomes of prompts with too many tokens: left out, cut at their beginning, or refused."""


@dataclass(frozen=True, kw_only=True)
class TaskDataSpec:
    """How rows of one task become prompts."""

    task_name: str
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    apply_chat_template: bool = True
    system_prompt: str | None = None
    prompt: str | None = None
    """Words around every prompt, which stands where this has {}; {NAME} is a column."""
    chat_template: str | None = None
    """Jinja; None: the tokenizer's own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    """Definitions that the chat template is given."""
    long_prompts: LongPrompts = "filter"


DataProcessor = Callable[[dict[str, Any], TaskDataSpec, Any, int, int], DatumSpec]
"""(row, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec."""


def task_of(row: Mapping[str, Any], default: str) -> Any:
    """What a row has as task_name; the default where it has no such column, or null in it, as Parquet fills gaps."""
    task = row.get("task_name")
    return default if task is None else task
