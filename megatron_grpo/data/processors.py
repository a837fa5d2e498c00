"""Prompts as token ids, and the default processor of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from jinja2 import TemplateError

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.data.chat_messages import join_content, read_row_tools
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer

REFERENCE = "<reference>"  # key of the reference answer, as text, in extra_env_info; no column has this name


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str
    token_ids: list[int]
    """Tokens of the turn, with the markup of the chat template."""


class DatumSpec(TypedDict):
    """One prompt, ready to be sampled from.

    Example:
        {"message_log": [{"role": "user", "content": "2+3=", "token_ids": [17, 10, 18, 28]}], "length": 4,
         "extra_env_info": {"answer": "5", REFERENCE: "5"}, "loss_multiplier": 1.0, "idx": 7, "task_name": "math",
         "prompt": "2+3="}
    """

    message_log: list[Message]
    length: int
    """Tokens of all messages together."""
    extra_env_info: dict[str, Any]
    """Data for the environment: the row's columns, and REFERENCE."""
    loss_multiplier: float
    """Weight of the loss of the prompt's responses, from 0 (it is left out) to 1."""
    idx: int
    """Row number in the dataset: the identity of the prompt in seeds, logs and dumps."""
    task_name: str
    prompt: str | list[dict[str, str]]
    """The row's prompt as it is in the data, for logs and reward functions."""
    rejected: NotRequired[list[Message]]
    """The conversation with the worse response of a pair; message_log has the better one."""
    label: NotRequired[bool]
    """True if the response of a row that is no pair is desirable."""
    margin: NotRequired[float]
    """Difference that the scores of a pair should exceed; absent: 0."""
    images: NotRequired[list[StoredImage]]
    """Images of the prompt, in the order of their placeholders; absent: it has none."""
    dataset: NotRequired[str]
    """Name of the prompt's validation set; absent where sets have no names."""


@dataclass(frozen=True, kw_only=True)
class TaskDataSpec(PromptFormat):
    """How rows of one task become prompts."""

    task_name: str
    prompt_key: str = "prompt"
    answer_key: str | None = "answer"
    response_key: str | None = None
    """Column with the response to learn from; None: the prompt's column has whole conversations."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str | None = None
    """Column that is true for desirable responses."""
    prompt: str | None = None
    """Text around every prompt: {} is replaced by the prompt, {NAME} by a column."""
    prompt_setting: str = "data.prompt_file"
    """Setting that `prompt` comes from, for messages."""
    long_prompts: Literal["filter", "cut_left", "error"] = "filter"
    """Handling of prompts with too many tokens: left out, cut at their beginning, or an error."""


DataProcessor = Callable[[dict[str, Any], TaskDataSpec, Any, int, int], DatumSpec]
"""A function (row, task_data_spec, tokenizer, max_seq_length, idx) -> DatumSpec."""


def find_task(row: Mapping[str, Any], default: str) -> Any:
    """Find a row's task_name, or the default."""
    task = row.get("task_name")
    return default if task is None else task


def math_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make the prompt of a row with a reference answer.

    The row's prompt is a text, or a list of {role, content} messages for a chat template. A chat template writes the
    special tokens itself; a plain prompt gets the special tokens that the tokenizer puts before any text (for many
    tokenizers none). A conversation that ends with a message of the assistant stays open, so that the response goes on
    from it. A prompt of more than max_seq_length tokens gets loss_multiplier 0 and keeps its tokens, is cut at its
    beginning, or is refused, as task_data_spec.long_prompts says. extra_env_info holds the row's other columns
    unchanged and, if there is a reference answer, the answer as text under REFERENCE, and unchanged under "answer"
    unless another column has that name.

    ValueError: the prompt has no tokens or too many, the text of data.prompt_file does not fit it, or the tokenizer has
    no chat template, or its template refuses the prompt.
    """
    text = render_prompt(datum_dict, task_data_spec, tokenizer, idx)
    token_ids = PromptRenderer(tokenizer, task_data_spec).encode_prompt(text)
    if not token_ids:
        raise ValueError(f"row {idx}: the prompt {text!r} has no tokens")
    if len(token_ids) > max_seq_length and task_data_spec.long_prompts != "filter":
        if task_data_spec.long_prompts == "error":
            text = f"has {len(token_ids)} tokens, more than data.max_input_seq_length={max_seq_length}"
            raise ValueError(f"row {idx}: the prompt {text} (data.long_prompts=error)")
        token_ids = token_ids[-max_seq_length:]
        text = tokenizer.decode(token_ids)
    extra = {key: value for key, value in datum_dict.items() if key != task_data_spec.prompt_key}
    if task_data_spec.answer_key is not None:
        answer = datum_dict[task_data_spec.answer_key]
        extra = {"answer": answer, **extra, REFERENCE: str(answer)}
    # One message, the complete rendered prompt: templates may render a message differently if further messages follow,
    # so only the complete conversation has well-defined tokens.
    return DatumSpec(
        message_log=[{"role": "user", "content": text, "token_ids": token_ids}],
        length=len(token_ids),
        extra_env_info=extra,
        loss_multiplier=1.0 if len(token_ids) <= max_seq_length else 0.0,
        idx=idx,
        task_name=find_task(datum_dict, task_data_spec.task_name),
        prompt=datum_dict[task_data_spec.prompt_key],
    )


def render_prompt(row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, idx: int) -> str:
    """Render a row's prompt to text.

    ValueError: the text of data.prompt_file does not fit, there is no chat template, or it refuses the prompt.
    """
    prompt = apply_prompt_file(row[spec.prompt_key], row, spec, idx)
    renderer = PromptRenderer(tokenizer, spec)
    if spec.apply_chat_template and not renderer.has_template:
        raise ValueError("the tokenizer has no chat template; set data.apply_chat_template=false for plain prompts")
    try:
        return renderer.render_first_turn(prompt, read_row_tools(row) if spec.apply_chat_template else None)
    except (TemplateError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"row {idx}: the tokenizer's chat template refuses the prompt: {error}") from error


def apply_prompt_file(prompt: Any, row: dict[str, Any], spec: TaskDataSpec, idx: int) -> Any:
    """Put the prompt file's text around a prompt, or around its user's last message."""
    if spec.prompt is None:
        return prompt
    last = None
    if not isinstance(prompt, str):
        last = next((index for index in reversed(range(len(prompt))) if prompt[index]["role"] == "user"), None)
        if last is None:
            raise ValueError(f"row {idx}: {spec.prompt_setting} has no place in it, because no message is the user's")
    question = prompt if last is None else join_content(prompt[last].get("content"))
    try:
        text = spec.prompt.format(question, **{name: value for name, value in row.items() if name.isidentifier()})
    # A format may look into a column, as {scores[0]} and {scores.first} do, so many errors are possible.
    except (IndexError, KeyError, ValueError, AttributeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}; write braces of the text as {{{{ and }}}}"
        raise ValueError(f"row {idx}: {spec.prompt_setting} cannot be filled in: {reason}") from error
    return text if last is None else [*prompt[:last], {**prompt[last], "content": text}, *prompt[last + 1 :]]
