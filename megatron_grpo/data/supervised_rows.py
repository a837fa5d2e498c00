"""Rows with the responses to learn from, as token ids: conversations whose assistant turns are in the loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from megatron_grpo.data.processors import DatumSpec, Message, TaskDataSpec, apply_prompt_file, find_task
from megatron_grpo.data.prompt_renderer import ChatMessage, PromptRenderer, join_content
from megatron_grpo.data.recorded_rows import RECORDED, RecordedSequence, split_sequence

_ADVICE = "; give a template that keeps it in data.chat_template, or leave the row out (data.bad_rows=skip)"
# Role of the messages whose tokens are learnt.
ASSISTANT = "assistant"


class Part(NamedTuple):
    """A part of a conversation's text.

    Example: Part("4<|im_end|>", is_learnt=True)
    """

    text: str
    is_learnt: bool


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
    spec = task_data_spec
    prompt = apply_prompt_file(datum_dict[spec.prompt_key], datum_dict, spec, idx)
    response = None if spec.response_key is None else datum_dict[spec.response_key]
    try:
        messages = encode_conversation(PromptRenderer(tokenizer, spec), prompt, response)
    except ValueError as error:
        raise ValueError(f"row {idx}: {error}") from error
    length = sum(len(message["token_ids"]) for message in messages)
    _require_length(length, max_seq_length, spec, idx)
    return DatumSpec(
        message_log=messages,
        length=length,
        extra_env_info={},
        loss_multiplier=1.0 if length <= max_seq_length else 0.0,
        idx=idx,
        task_name=find_task(datum_dict, spec.task_name),
        prompt=datum_dict[spec.prompt_key],
    )


def preference_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make the two sequences of a row's chosen and rejected responses.

    Each is made as by `supervised_data_processor`. Without a prompt, the responses are conversations, whose common
    first messages are the prompt.
    """
    return _make_pair(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)


def score_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make a pair (`preference_data_processor`) for a reward model.

    Its conversations are whole, with blanks that the template writes behind the last turn: a reward model scores the
    last token. A column "margin" is the difference that the scores should exceed.
    """
    pair = _make_pair(datum_dict, task_data_spec, tokenizer, max_seq_length, idx, is_whole=True)
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
    *,
    is_whole: bool = False,
) -> DatumSpec:
    spec, pair = task_data_spec, [datum_dict[task_data_spec.chosen_key], datum_dict[task_data_spec.rejected_key]]
    if spec.prompt_key in datum_dict:
        prompt = apply_prompt_file(datum_dict[spec.prompt_key], datum_dict, spec, idx)
    else:
        equal = itertools.takewhile(lambda messages: messages[0] == messages[1], zip(*pair, strict=False))
        prompt = [first for first, _ in equal]
        pair = [conversation[len(prompt) :] for conversation in pair]
    try:
        renderer = PromptRenderer(tokenizer, spec)
        chosen, rejected = (encode_conversation(renderer, prompt, answer, is_whole=is_whole) for answer in pair)
    except ValueError as error:
        raise ValueError(f"row {idx}: {error}") from error
    if _list_compared_tokens(chosen, is_whole=is_whole) == _list_compared_tokens(rejected, is_whole=is_whole):
        columns = f"columns {spec.chosen_key!r} and {spec.rejected_key!r}"
        text = "have the same tokens once they are rendered, so that nothing can be learnt"
        raise ValueError(f"row {idx}: {columns} {text}; leave the row out (data.bad_rows=skip)")
    length = max(sum(len(message["token_ids"]) for message in messages) for messages in (chosen, rejected))
    _require_length(length, max_seq_length, spec, idx)
    return DatumSpec(
        message_log=chosen,
        rejected=rejected,
        length=length,
        extra_env_info={},
        loss_multiplier=1.0 if length <= max_seq_length else 0.0,
        idx=idx,
        task_name=find_task(datum_dict, spec.task_name),
        prompt=prompt,
    )


def _list_compared_tokens(messages: Sequence[Message], *, is_whole: bool) -> list[int]:
    """List the tokens that decide a pair's outcome.

    A reward model scores a whole conversation; what follows the last learnt turn does not reach its log-probability.
    """
    last = max(number for number, message in enumerate(messages) if message["role"] == ASSISTANT)
    compared = messages if is_whole else messages[: last + 1]
    return [token for message in compared for token in message["token_ids"]]


def _require_length(length: int, longest: int, spec: TaskDataSpec, idx: int) -> None:
    if length > longest and spec.long_prompts == "error":
        text = f"has {length} tokens, more than policy.max_total_sequence_length={longest}"
        raise ValueError(f"row {idx}: the conversation {text} (data.long_prompts=error)")


def recorded_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """Make a sequence of a recorded rollout; its sampled tokens are learnt."""
    sequence: RecordedSequence = datum_dict[RECORDED]
    length = len(sequence.token_ids)
    _require_length(length, max_seq_length, task_data_spec, idx)
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


def encode_conversation(
    renderer: PromptRenderer,
    prompt: str | Sequence[ChatMessage],
    response: str | Sequence[ChatMessage] | None,
    *,
    is_whole: bool = False,
) -> list[Message]:
    """Encode a conversation; the role of its learnt parts is assistant.

    `response` follows the prompt; None: the prompt is a conversation, whose assistant turns are learnt. `is_whole`:
    keep blanks behind the last turn.

    ValueError: the tokens of the learnt turns cannot be told exactly.
    """
    if not renderer.format.apply_chat_template:
        assert isinstance(prompt, str), "messages need a chat template"
        assert isinstance(response, str), "messages need a chat template"
        return _encode_plain(renderer, prompt, response)
    earlier = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    later: Sequence[ChatMessage] = []
    if response is not None:
        later = [{"role": ASSISTANT, "content": response}] if isinstance(response, str) else list(response)
    first = 0 if response is None else len(earlier)
    try:
        parts = list(split_rendering(renderer, [*earlier, *later], first, is_whole=is_whole))
    except (TemplateError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    return list(_encode_parts(renderer, parts))


def _encode_plain(renderer: PromptRenderer, prompt: str, response: str) -> list[Message]:
    end = renderer.tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end of sequence (eos_token), so no response would end")
    prompt_ids = renderer.encode_plain(prompt)
    if not prompt_ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    response_ids = renderer.encode_after(response, prompt_ids[-1])
    ids = response_ids if response_ids[-1:] == [end] else [*response_ids, end]
    return [
        Message(role="user", content=prompt, token_ids=prompt_ids),
        Message(role=ASSISTANT, content=response, token_ids=ids),
    ]


def split_rendering(
    renderer: PromptRenderer, messages: Sequence[ChatMessage], first: int, *, is_whole: bool = False
) -> Iterator[Part]:
    """Split the rendering of a whole conversation into learnt and other parts.

    Learnt are the turns of the assistant among messages[first:]. A turn begins where sampling would begin it, and ends
    with the special token that ends it; a line break after that token is not learnt, because no response has it. Blanks
    at the end of the text are left out unless the rendering `is_whole`.

    ValueError: the template does not show a turn in full, or renders its beginning otherwise when it is sampled.
    """
    text, position = renderer.render(messages, add_generation_prompt=False), 0
    turns = [number for number in range(first, len(messages)) if messages[number].get("role") == ASSISTANT]
    if not turns:
        raise ValueError("the conversation has no message of the assistant to learn from")
    for number in turns:
        name = f"message {number + 1}, the assistant's"
        if number == 0:
            raise ValueError("the conversation begins with a message of the assistant, which no prompt precedes")
        try:
            before = renderer.render(messages[:number])
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses what precedes {name}, as a prompt, so that the turn is never sampled: "
                f"{error}{_ADVICE}"
            ) from error
        if not text.startswith(before) or len(before) < position:
            raise ValueError(
                f"the chat template renders what precedes {name}, otherwise in the whole conversation than as a "
                f"prompt, so that the turn would be learnt after another text than it is sampled after{_ADVICE}"
            )
        end = _find_turn_end(renderer, messages, number, text)
        # A generation prompt may begin the turn, as <think> does, so that the content begins there.
        opening = before.removeprefix(renderer.render(messages[:number], add_generation_prompt=False))
        turn = text[len(before) : end]
        _require_content(messages[number], opening + turn, name)
        yield Part(text[position : len(before)], is_learnt=False)
        yield Part(turn, is_learnt=True)
        position = end
    if text[position:].strip() or (is_whole and text[position:]):
        yield Part(text[position:], is_learnt=False)


def _find_turn_end(renderer: PromptRenderer, messages: Sequence[ChatMessage], number: int, text: str) -> int:
    """Find the end of an assistant's turn in the whole text."""
    content = messages[number].get("content")
    is_plain = isinstance(content, str) and bool(content.strip()) and not messages[number].get("tool_calls")
    through = renderer.render(messages[: number + 1], add_generation_prompt=False)
    if text.startswith(through):
        begin = through.rfind(content.strip()) if is_plain and isinstance(content, str) else -1
        content_end = begin + len(str(content).strip()) if begin >= 0 else 0
        token = renderer.find_first_special(through[content_end:]) if begin >= 0 else None
        if token is not None:
            return through.index(token, content_end) + len(token)
        # Blanks behind the token that ends the turn are the template's; without such a token they are part of the turn.
        return len(through.rstrip()) if renderer.has_special_end(through.rstrip()) else len(through)
    if not is_plain:
        text = f"the chat template changes message {number + 1}, the assistant's, once others follow"
        raise ValueError(text + _ADVICE)
    return _find_changed_turn_end(renderer, messages, number, text)


def _find_changed_turn_end(renderer: PromptRenderer, messages: Sequence[ChatMessage], number: int, text: str) -> int:
    """Find the end of a turn that would be rendered otherwise as the last."""
    mark, name = renderer.make_mark(), f"message {number + 1}, the assistant's"
    marked_messages = [*messages[:number], {**messages[number], "content": mark}, *messages[number + 1 :]]
    _, mark_in_text, after = renderer.render(marked_messages, add_generation_prompt=False).rpartition(mark)
    if not mark_in_text or not text.endswith(after):
        raise ValueError(f"the chat template leaves out {name}{_ADVICE}")
    token = renderer.find_first_special(after)
    if token is None:
        raise ValueError(f"the chat template ends {name}, with no special token{_ADVICE}")
    return len(text) - len(after) + after.index(token) + len(token)


def _require_content(message: ChatMessage, turn: str, name: str) -> None:
    visible = "".join(turn.split())
    for key in ("content", "reasoning_content"):
        text = join_content(message.get(key))
        if "".join(text.split()) not in visible:
            part = "the thoughts of" if key == "reasoning_content" or "</think>" in text else "a part of"
            raise ValueError(f"the chat template leaves out {part} {name}, so they cannot be learnt{_ADVICE}")
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping) and str(function.get("name", "")) not in turn:
            raise ValueError(f"the chat template leaves out a call in {name}{_ADVICE}")


def _encode_parts(renderer: PromptRenderer, parts: Sequence[Part]) -> Iterator[Message]:
    # The text is encoded as a whole. Its tokens are cut where a part ends; a token across the cut would belong to both.
    ids = renderer.encode_rendered("".join(part.text for part in parts))
    text, begin = "", 0
    for number, part in enumerate(parts):
        text += part.text
        end = len(ids) if number == len(parts) - 1 else len(renderer.encode_rendered(text))
        if number < len(parts) - 1 and renderer.encode_rendered(text) != ids[:end]:
            raise ValueError(
                f"a token of the rendered conversation lies across the beginning or end of an assistant's turn, near "
                f"{part.text[-20:]!r}, so the turn has no tokens of its own{_ADVICE}"
            )
        if end > begin:
            yield Message(role=ASSISTANT if part.is_learnt else "user", content=part.text, token_ids=ids[begin:end])
        begin = end


def find_row_problem(row: Mapping[str, Any], spec: TaskDataSpec, is_conversation: Any) -> str | None:
    """Find why a row cannot be learnt from, by its columns; None: it can.

    `is_conversation(value)` says whether a value is a list of messages.
    """
    keys = [("prompt_key", spec.prompt_key)]
    keys += [("response_key", spec.response_key)] if spec.response_key is not None else []
    for setting, column in keys:
        if column not in row:
            text = f"has no column {column!r} (data.{setting}); it has {', '.join(map(str, row)) or 'none'}"
            return text if spec.response_key else f"{text}; give data.response_key for rows of prompt and response"
        value = row[column]
        if not ((isinstance(value, str) and value) or is_conversation(value)):
            return f"column {column!r} is neither a text nor a list of {{role, content}} messages"
        if isinstance(value, list) and not spec.apply_chat_template:
            return f"column {column!r} is a list of messages, which needs data.apply_chat_template=true"
    if spec.response_key is None and isinstance(row[spec.prompt_key], str):
        return f"column {spec.prompt_key!r} is a text, and its response is in another; name that in data.response_key"
    learnt = row[spec.prompt_key if spec.response_key is None else spec.response_key]
    if isinstance(learnt, list) and not any(message.get("role") == ASSISTANT for message in learnt):
        return "has no message of the assistant to learn from"
    return None


def find_pair_problem(row: Mapping[str, Any], spec: TaskDataSpec, is_conversation: Any) -> str | None:
    """Find why a row is no pair to learn from; None: it is."""
    for setting, column in (("chosen_key", spec.chosen_key), ("rejected_key", spec.rejected_key)):
        if column not in row:
            return f"has no column {column!r} (data.{setting}); it has {', '.join(map(str, row)) or 'none'}"
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
    for column in columns:
        value = row[column]
        if not ((isinstance(value, str) and value) or is_conversation(value)):
            return f"column {column!r} is neither a text nor a list of {{role, content}} messages"
        if isinstance(value, list) and not spec.apply_chat_template:
            return f"column {column!r} is a list of messages, which needs data.apply_chat_template=true"
    return None
