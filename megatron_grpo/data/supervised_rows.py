"""Rows with the responses to learn from, as token ids: conversations whose assistant turns are in the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_grpo.data.chat_messages import ASSISTANT, is_conversation, is_learnt, read_row_tools, separate_prompt
from megatron_grpo.data.conversation_tokens import encode_conversation, encode_scored
from megatron_grpo.data.processors import DatumSpec, Message, TaskDataSpec, apply_prompt_file, find_task
from megatron_grpo.data.prompt_renderer import PromptRenderer
from megatron_grpo.data.recorded_rows import RECORDED, RecordedSequence, split_sequence

# Columns that public sets have, by the setting that names one.
_USUAL_COLUMNS = {
    "prompt_key": ("prompt", "question", "problem", "instruction", "messages", "conversations"),
    "answer_key": ("answer", "solution", "ground_truth", "expected_answer"),
    "response_key": ("completion", "response", "answer", "output"),
    "chosen_key": ("chosen",),
    "rejected_key": ("rejected",),
    "label_key": ("label",),
}


def supervised_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make a sequence whose assistant messages are the tokens in the loss.

    The row has a prompt and a response (`response_key`), or a conversation, all of whose assistant turns are learnt. A
    chat template renders the whole conversation once, and the tokens in the loss are those of its assistant turns, up
    to the token that ends them. Without a template the tokens of the response follow those of the prompt, as in
    sampling, and the tokenizer's end of sequence follows the response. A longer sequence than max_seq_length gets
    loss_multiplier 0, or is refused, as task_data_spec.long_prompts says.

    ValueError: the row has too many tokens, or no exact tokens of its assistant turns.
    """
    spec, prompt, response = task_data_spec, datum_dict[task_data_spec.prompt_key], None
    try:
        if spec.response_key is not None:
            prompt, (response,) = separate_prompt(prompt, [datum_dict[spec.response_key]])
        prompt = apply_prompt_file(prompt, datum_dict, spec, idx)
        messages = encode_conversation(PromptRenderer(tokenizer, spec), prompt, response, _read_tools(datum_dict, spec))
    except ValueError as error:
        raise ValueError(name_row(error, idx)) from error
    length = sum(len(message["token_ids"]) for message in messages)
    require_length(length, max_seq_length, spec, idx)
    return DatumSpec(
        message_log=messages,
        length=length,
        extra_env_info=_list_other_columns(datum_dict, spec.prompt_key, spec.response_key),
        loss_multiplier=1.0 if length <= max_seq_length else 0.0,
        idx=idx,
        task_name=find_task(datum_dict, spec.task_name),
        prompt=datum_dict[spec.prompt_key],
    )


def labelled_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make a sequence with the label of its response."""
    row = supervised_data_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)
    assert task_data_spec.label_key is not None, "rows without labels are pairs"
    return {**row, "label": bool(datum_dict[task_data_spec.label_key])}


def preference_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make the two sequences of a row's chosen and rejected responses.

    Each is made as by `supervised_data_processor`. Without a prompt, the responses are conversations, whose common
    first messages are the prompt.
    """
    return _make_pair(datum_dict, task_data_spec, tokenizer, max_seq_length, idx, encode_conversation)


def score_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make a pair (`preference_data_processor`) for a reward model.

    Its conversations are whole, with blanks that the template writes behind the last turn: a reward model scores the
    last token. A column "margin" is the difference that the scores should exceed.
    """
    pair = _make_pair(datum_dict, task_data_spec, tokenizer, max_seq_length, idx, encode_scored)
    margin = datum_dict.get("margin")
    if margin is None:
        return pair
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"row {idx}: margin={margin!r} is no number")
    return {**pair, "margin": float(margin)}


def _make_pair(
    datum_dict: dict[str, Any],
    task_data_spec: TaskDataSpec,
    tokenizer: Any,
    max_seq_length: int,
    idx: int,
    encode: Callable[..., list[Message]],
) -> DatumSpec:
    spec, pair = task_data_spec, [datum_dict[task_data_spec.chosen_key], datum_dict[task_data_spec.rejected_key]]
    try:
        prompt, pair = separate_prompt(datum_dict.get(spec.prompt_key), pair)
        prompt = apply_prompt_file(prompt, datum_dict, spec, idx)
        renderer, tools = PromptRenderer(tokenizer, spec), _read_tools(datum_dict, spec)
        chosen, rejected = (encode(renderer, prompt, answer, tools) for answer in pair)
    except ValueError as error:
        raise ValueError(name_row(error, idx)) from error
    is_whole = encode is encode_scored
    if _list_compared_tokens(chosen, is_whole=is_whole) == _list_compared_tokens(rejected, is_whole=is_whole):
        columns = f"columns {spec.chosen_key!r} and {spec.rejected_key!r}"
        text = "have the same tokens once they are rendered, so that nothing can be learnt"
        raise ValueError(f"row {idx}: {columns} {text}; leave the row out (data.bad_rows=skip)")
    length = max(sum(len(message["token_ids"]) for message in messages) for messages in (chosen, rejected))
    require_length(length, max_seq_length, spec, idx)
    return DatumSpec(
        message_log=chosen,
        rejected=rejected,
        length=length,
        extra_env_info=_list_other_columns(datum_dict, spec.prompt_key, spec.chosen_key, spec.rejected_key),
        loss_multiplier=1.0 if length <= max_seq_length else 0.0,
        idx=idx,
        task_name=find_task(datum_dict, spec.task_name),
        prompt=prompt,
    )


def _list_other_columns(row: Mapping[str, Any], *learnt: str | None) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in learnt}


def list_image_columns(row: Mapping[str, Any], spec: TaskDataSpec) -> list[str]:
    """List the columns whose messages have places for images.

    That is the prompt, or both conversations of a pair without one.
    """
    names = [spec.prompt_key] if spec.prompt_key in row else [spec.chosen_key, spec.rejected_key]
    return [name for name in names if name in row]


def name_row(error: ValueError, idx: int) -> str:
    """Name the row in the text of an error, once."""
    return str(error) if str(error).startswith("row ") else f"row {idx}: {error}"


def _read_tools(row: Mapping[str, Any], spec: TaskDataSpec) -> list[dict[str, Any]] | None:
    return read_row_tools(row) if spec.apply_chat_template else None


def _list_compared_tokens(messages: Sequence[Message], *, is_whole: bool) -> list[int]:
    """List the tokens that decide a pair's outcome.

    A reward model scores a whole conversation; what follows the last learnt turn does not reach its log-probability.
    """
    last = max(number for number, message in enumerate(messages) if message["role"] == ASSISTANT)
    compared = messages if is_whole else messages[: last + 1]
    return [token for message in compared for token in message["token_ids"]]


def require_length(length: int, longest: int, spec: TaskDataSpec, idx: int) -> None:
    """ValueError: a conversation is too long, and may not be left out."""
    if length > longest and spec.long_prompts == "error":
        text = f"has {length} tokens, more than policy.max_total_sequence_length={longest}"
        raise ValueError(f"row {idx}: the conversation {text} (data.long_prompts=error)")


def recorded_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make a sequence of a recorded rollout; its sampled tokens are learnt."""
    sequence: RecordedSequence = datum_dict[RECORDED]
    length = len(sequence.token_ids)
    require_length(length, max_seq_length, task_data_spec, idx)
    messages = [
        Message(
            role=ASSISTANT if is_sampled else "user", content=sequence.response if is_sampled else "", token_ids=ids
        )
        for ids, is_sampled in split_sequence(sequence)
    ]
    return DatumSpec(
        message_log=messages,
        length=length,
        extra_env_info={},
        loss_multiplier=1.0 if length <= max_seq_length else 0.0,
        idx=idx,
        task_name=task_data_spec.task_name,
        prompt=sequence.origin,
    )


def describe_missing_column(row: Mapping[str, Any], setting: str, column: str) -> str:
    """Describe a missing column, and the one that may be meant.

    `setting`: key of `data` that names the column.
    """
    text = f"has no column {column!r} (data.{setting}); it has {', '.join(map(str, row)) or 'none'}"
    usual = next((name for name in _USUAL_COLUMNS[setting] if name in row), None)
    return text if usual is None else f"{text}; did you mean data.{setting}={usual}?"


def find_row_problem(row: Mapping[str, Any], spec: TaskDataSpec) -> str | None:
    """Find why a row cannot be learnt from, by its columns; None: it can."""
    keys = [("prompt_key", spec.prompt_key)]
    keys += [("response_key", spec.response_key)] if spec.response_key is not None else []
    for setting, column in keys:
        if column not in row:
            text = describe_missing_column(row, setting, column)
            return text if spec.response_key else f"{text}; give data.response_key for rows of prompt and response"
        if problem := _find_value_problem(row, column, spec):
            return problem
    if spec.response_key is None and isinstance(row[spec.prompt_key], str):
        return f"column {spec.prompt_key!r} is a text, and its response is in another; name that in data.response_key"
    learnt = row[spec.prompt_key if spec.response_key is None else spec.response_key]
    if isinstance(learnt, list) and not any(message.get("role") == ASSISTANT for message in learnt):
        return "has no message of the assistant to learn from"
    return _find_turn_problem(row, spec, [] if spec.response_key is None else [learnt])


def find_label_problem(row: Mapping[str, Any], spec: TaskDataSpec) -> str | None:
    """Find why a row has no label; None: it has."""
    assert spec.label_key is not None, "rows without labels are pairs"
    if spec.label_key not in row:
        text = describe_missing_column(row, "label_key", spec.label_key)
        return f"{text}; give data.label_key=null for rows of a better and a worse response"
    label = row[spec.label_key]
    if not isinstance(label, bool) and label not in (0, 1):
        text = f"is {label!r}; write true for a desirable response, else false"
        return f"column {spec.label_key!r} (data.label_key) {text}"
    return find_row_problem(row, spec)


def find_pair_problem(row: Mapping[str, Any], spec: TaskDataSpec) -> str | None:
    """Find why a row is no pair to learn from; None: it is."""
    for setting, column in (("chosen_key", spec.chosen_key), ("rejected_key", spec.rejected_key)):
        if column not in row:
            return describe_missing_column(row, setting, column)
    pair = [row[spec.chosen_key], row[spec.rejected_key]]
    if spec.prompt_key not in row:
        if not all(map(is_conversation, pair)):
            text = f"has no column {spec.prompt_key!r} (data.prompt_key), and its responses are no conversations"
            return f"{text} from which it could be taken"
        if pair[0][:1] != pair[1][:1]:
            return f"has no column {spec.prompt_key!r}, and its responses begin with different messages"
    if pair[0] == pair[1]:
        return f"columns {spec.chosen_key!r} and {spec.rejected_key!r} are equal, so that nothing can be learnt"
    columns = [column for column in (spec.prompt_key, spec.chosen_key, spec.rejected_key) if column in row]
    problems = (_find_value_problem(row, column, spec) for column in columns)
    return next(filter(None, problems), None) or _find_turn_problem(row, spec, pair)


def _find_value_problem(row: Mapping[str, Any], column: str, spec: TaskDataSpec) -> str | None:
    value = row[column]
    if not ((isinstance(value, str) and value) or is_conversation(value)):
        return f"column {column!r} is neither a text nor a list of {{role, content}} messages"
    if isinstance(value, list) and not spec.apply_chat_template:
        return f"column {column!r} is a list of messages, which needs data.apply_chat_template=true"
    return None


def _find_turn_problem(row: Mapping[str, Any], spec: TaskDataSpec, responses: list[Any]) -> str | None:
    """Find responses of another prompt, and marks that cannot be read."""
    try:
        prompt = row.get(spec.prompt_key)
        if responses:
            separate_prompt(prompt, responses)
        for conversation in responses or [prompt]:
            for number, message in enumerate([] if isinstance(conversation, str) else conversation, start=1):
                is_learnt(message, number)
    except ValueError as error:
        return str(error)
    return None
