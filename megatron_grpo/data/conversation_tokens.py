"""Encodes conversations to learn from, with the tokens of their assistant turns apart, and conversations to score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from jinja2 import TemplateError

from megatron_grpo.data.chat_messages import ASSISTANT, ChatMessage, is_learnt, join_content, join_turns
from megatron_grpo.data.omissions import find_omissions
from megatron_grpo.data.processors import Message
from megatron_grpo.data.prompt_renderer import PromptRenderer

_ADVICE = "; give a template that keeps it in data.chat_template, or leave the row out (data.bad_rows=skip)"
_REFUSALS = (TemplateError, TypeError, KeyError, OverflowError, RecursionError)  # besides ValueError


class Part(NamedTuple):
    """A part of a conversation's text.

    Example: Part("4<|im_end|>", is_learnt=True)
    """

    text: str
    is_learnt: bool


def encode_conversation(
    renderer: PromptRenderer,
    prompt: str | Sequence[ChatMessage],
    response: str | Sequence[ChatMessage] | None,
    tools: Sequence[ChatMessage] | None = None,
) -> list[Message]:
    """Encode a conversation; the role of its learnt parts is assistant.

    `response` follows the prompt, or goes on from its open turn; None: the prompt is a conversation, whose assistant
    turns are learnt, but for those that are marked. `tools`: the row's own; None: the settings'.

    ValueError: the tokens of the learnt turns cannot be told exactly, or the template leaves out a part.
    """
    if not renderer.format.apply_chat_template:
        return _encode_plain(renderer, prompt, response)
    messages, first = _join(prompt, response)
    turns = [number for number in range(first, len(messages)) if is_learnt(messages[number], number + 1)]
    if not turns:
        reason = "marks all messages of the assistant as not" if any(map(_is_turn, messages[first:])) else "has none"
        raise ValueError(f"the conversation {reason} to learn from")
    opened = prompt if response is not None and not isinstance(prompt, str) and first < len(prompt) else None
    try:
        require_shown(renderer, messages, tools, turns)
        parts = list(split_rendering(renderer, messages, turns, tools, opened))
    except _REFUSALS as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    return list(_encode_parts(renderer, parts))


def encode_scored(
    renderer: PromptRenderer,
    prompt: str | Sequence[ChatMessage],
    response: str | Sequence[ChatMessage],
    tools: Sequence[ChatMessage] | None = None,
    *,
    needs_thoughts: bool = True,
) -> list[Message]:
    """Encode a whole conversation for a reward model.

    The model scores the last token. Blanks that the template writes behind the last turn belong to it.

    ValueError: the template refuses the conversation, or leaves out a part; thoughts may be missing unless
    `needs_thoughts`.
    """
    if not renderer.format.apply_chat_template:
        return _encode_plain(renderer, prompt, response)
    messages, first = _join(prompt, response)
    turns = [number for number in range(first, len(messages)) if _is_turn(messages[number])]
    if not turns:
        raise ValueError("the conversation has no message of the assistant to score")
    try:
        require_shown(renderer, messages, tools, turns if needs_thoughts else [])
        text = renderer.render(messages, tools=tools, add_generation_prompt=False)
    except _REFUSALS as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    for number in turns if needs_thoughts else []:
        _require_content(messages[number], text, number)
    return [Message(role=ASSISTANT, content=text, token_ids=renderer.encode_rendered(text))]


def _join(
    prompt: str | Sequence[ChatMessage], response: str | Sequence[ChatMessage] | None
) -> tuple[list[ChatMessage], int]:
    """Join a conversation; returns also the index where the response begins."""
    earlier: Sequence[ChatMessage] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if response is None:
        return list(earlier), 0
    later = [{"role": ASSISTANT, "content": response}] if isinstance(response, str) else response
    messages = join_turns(earlier, later)
    return messages, len(messages) - len(later)


def _is_turn(message: ChatMessage) -> bool:
    return message.get("role") == ASSISTANT


def require_shown(
    renderer: PromptRenderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[ChatMessage] | None,
    turns: Sequence[int],
) -> None:
    """Require that the template shows all messages, and the thoughts of `turns`.

    Thoughts of other turns may be missing, as they are when a later turn is sampled.
    """
    for omission in find_omissions(renderer, messages, tools=tools):
        if not omission.are_thoughts or omission.number - 1 in turns:
            raise ValueError(f"the chat template leaves out {omission}{_ADVICE}")


def _encode_plain(renderer: PromptRenderer, prompt: Any, response: Any) -> list[Message]:
    assert isinstance(prompt, str), "messages need a chat template"
    assert isinstance(response, str), "messages need a chat template"
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
    renderer: PromptRenderer,
    messages: Sequence[ChatMessage],
    turns: Sequence[int],
    tools: Sequence[ChatMessage] | None,
    opened: Sequence[ChatMessage] | None,
) -> Iterator[Part]:
    """Split the rendering of a whole conversation into learnt and other parts.

    Learnt are the messages of the indices `turns`. A turn begins where sampling would begin it, and ends with the
    special token that ends it, or else with the one that begins the next message, where sampling stops, too; a line
    break after that token is not learnt, because no response has it. `opened`: a prompt whose last turn goes on in the
    first of `turns`. The template's text behind a last learnt turn is left out.

    ValueError: the template does not show a turn in full, or renders its beginning otherwise when it is sampled.
    """
    render = partial(renderer.render, tools=tools, add_generation_prompt=False)
    text, position = render(messages), 0
    for number in turns:
        name = f"message {number + 1}, the assistant's"
        if number == 0:
            raise ValueError("the conversation begins with a message of the assistant, which no prompt precedes")
        is_opened = opened is not None and number == len(opened) - 1
        try:
            before = (
                renderer.render_open(opened or [], tools=tools)
                if is_opened
                else renderer.render(messages[:number], tools=tools)
            )
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
        end = _find_turn_end(render, renderer, messages, number, text)
        # A generation prompt may begin the turn, as <think> does, so that the content begins there.
        opening = before.removeprefix(render(messages[:number]))
        turn = text[len(before) : end]
        _require_content(messages[number], opening + turn, number)
        closing = _find_closing(renderer, messages, number, text[:end], text[end:])
        yield Part(text[position : len(before)], is_learnt=False)
        yield Part(turn + closing, is_learnt=True)
        position = end + len(closing)
    if turns[-1] < len(messages) - 1 and text[position:].strip():
        yield Part(text[position:], is_learnt=False)


def _find_turn_end(
    render: Callable[..., str],
    renderer: PromptRenderer,
    messages: Sequence[ChatMessage],
    number: int,
    text: str,
) -> int:
    """Find the end of an assistant's turn in the whole text."""
    message, name = messages[number], f"message {number + 1}, the assistant's"
    context, rendering, is_unchanged = messages[: number + 1], render(messages[: number + 1]), True
    if not text.startswith(rendering):
        context, rendering, is_unchanged = messages, text, False
    if join_content(message.get("content")).strip() and not message.get("tool_calls"):
        # A mark in place of the content shows where it ends; the text itself may also occur within the end token.
        mark = renderer.make_mark()
        marked = [*context[:number], {**message, "content": mark}, *context[number + 1 :]]
        _, mark_in_text, after = render(marked).rpartition(mark)
        is_found = bool(mark_in_text) and rendering.endswith(after)
        token = renderer.find_first_special(after) if is_found else None
        if token is not None:
            return len(rendering) - len(after) + after.index(token) + len(token)
        if not is_unchanged:
            fault = f"ends {name}, with no special token" if is_found else f"leaves out {name}"
            raise ValueError(f"the chat template {fault}{_ADVICE}")
    elif not is_unchanged:
        raise ValueError(f"the chat template changes {name}, once others follow{_ADVICE}")
    # Blanks behind the token that ends the turn are the template's; without such a token they are part of the turn.
    return len(rendering.rstrip()) if renderer.has_special_end(rendering.rstrip()) else len(rendering)


def _find_closing(
    renderer: PromptRenderer, messages: Sequence[ChatMessage], number: int, text: str, later_text: str
) -> str:
    """Find the token of the next message that ends a turn.

    It is empty for turns with an end of their own. Turns of GLM end where the next message begins, and its responses
    with that message's first token, so nothing but this token teaches a model to stop. `text` ends with the turn;
    `later_text` follows it.
    """
    if renderer.has_control_end(text):
        return ""
    if number == len(messages) - 1:
        later_text = renderer.text_after_calls if messages[number].get("tool_calls") else renderer.text_after_answer
    return renderer.find_control_beginning(later_text)


def _require_content(message: ChatMessage, turn: str, number: int) -> None:
    content = join_content(message.get("content"))
    if "".join(content.split()) not in "".join(turn.split()):
        part = "the thoughts of" if "</think>" in content else "a part of"
        name = f"message {number + 1}, the assistant's"
        raise ValueError(f"the chat template leaves out {part} {name}, so they cannot be learnt{_ADVICE}")


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
