"""Prompts of an agent's calls: which response a call continues, and the tokens that follow it.

These functions run where they can be stopped (`call_texts.py`): agents choose the texts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from megatron_grpo.data.chat_messages import REASONING, ChatMessage, join_content, normalize_message
from megatron_grpo.data.image_rows import has_images
from megatron_grpo.data.omissions import find_omissions
from megatron_grpo.data.prompt_renderer import MODEL_TURN, PromptRenderer

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def is_continuation(messages: Sequence[ChatMessage], history: Sequence[ChatMessage]) -> bool:
    """True if messages repeat a history and add some."""
    pairs = enumerate(zip(messages, history, strict=False), start=1)
    return len(messages) > len(history) and all(_is_repeated(*pair, number) for number, pair in pairs)


def _is_repeated(message: ChatMessage, earlier: ChatMessage, number: int) -> bool:
    # Clients do not send reasoning back, or by one of its names.
    reasoning = {message[name] for name in REASONING if isinstance(message.get(name), str)}
    is_unchanged = reasoning <= {earlier[name] for name in REASONING if isinstance(earlier.get(name), str)} | {""}
    return is_unchanged and _simplify(message, number) == _simplify(earlier, number)


def _simplify(message: ChatMessage, number: int) -> dict[str, Any]:
    # Clients send back empty fields that they received, and write calls in another form.
    plain = normalize_message(message, number, keeps_parts=has_images(message.get("content")))
    fields = {name: value for name, value in plain.items() if value not in (None, "")}
    for name in REASONING:
        fields.pop(name, None)
    if "tool_calls" in fields:
        fields["tool_calls"] = [
            {name: value for name, value in call.items() if name not in ("index", "type")}
            if isinstance(call, dict)
            else call
            for call in fields["tool_calls"]
        ]
    return fields


def mark_turn(message: ChatMessage) -> tuple[dict[str, Any], str | None]:
    """Put a mark in place of a message's thinking, or before its text.

    None: it has neither, but calls, which templates write in their own form.
    """
    mark, content = f"{MODEL_TURN}{secrets.token_hex(8)}", join_content(message.get("content"))
    if any(message.get(name) for name in REASONING):
        return {**message, **{name: mark for name in REASONING if message.get(name)}}, mark
    for begin, end in _THINKING:
        thinking, is_end, rest = content.partition(end)
        if is_end:
            opening = thinking[: thinking.find(begin) + len(begin)] if begin in thinking else ""
            return {**message, "content": f"{opening}{mark}{end}{rest}"}, mark
    if not content and message.get("tool_calls"):
        return dict(message), None
    return {**message, "content": mark + content}, mark


class BadCallError(ValueError):
    """A call without an answer; the message is for the agent."""


class SampledTurn(NamedTuple):
    """A response that a call may continue, without its tokens."""

    number: int  # among the conversation's responses
    history: list[ChatMessage]  # messages up to the response, which is the last
    path: tuple[int, ...]  # places among them of the responses that lead to this one, which is the last
    rendered: str  # the rendered prompt before the first of these
    last_token: int


class CallPrompt(NamedTuple):
    """The prompt of a call."""

    parent: int | None  # number of the response that it continues
    context: list[int]  # tokens after the parent's
    restored: int | None = None  # number of the response whose history replaces the beginning of the call's messages
    rendered: str = ""  # the rendered prompt before the model's turn, of a prompt without a parent


@dataclass(frozen=True, slots=True)
class Chat:
    """A call's messages, and what replaces the task's tools and template variables."""

    messages: Sequence[ChatMessage]
    tools: Sequence[ChatMessage] | None
    variables: Mapping[str, Any] | None


def encode_chat(renderer: PromptRenderer, chat: Chat, turns: Sequence[SampledTurn]) -> CallPrompt:
    """Encode messages; BadCallError if the template refuses or leaves out some.

    `turns`: responses that the call may continue, the newest first.
    """
    messages, tools, variables = chat.messages, chat.tools, chat.variables
    try:
        conversation, restored = list(messages), None
        for turn in _find_continued(messages, turns):
            # The model's messages as they were answered: clients leave out reasoning, which the template may show.
            restored_messages = [*turn.history, *messages[len(turn.history) :]]
            if restored is None:
                conversation, restored = restored_messages, turn.number
            if _is_kept(renderer, turn, Chat(restored_messages, tools, variables)):
                _require_shown(renderer, Chat(restored_messages, tools, variables), after=len(turn.history))
                earlier, later = turn.history[:-1], restored_messages[len(turn.history) :]
                context = renderer.encode_continuation(
                    earlier, later, turn.last_token, tools=tools, variables=variables
                )
                return CallPrompt(turn.number, context, turn.number)
        _require_shown(renderer, Chat(conversation, tools, variables))
        text = renderer.render_open(conversation, tools=tools, variables=variables)
        # Templates open the model's turn in a prompt otherwise than among earlier turns, as with empty thinking.
        closed = renderer.render(conversation, tools=tools, variables=variables, add_generation_prompt=False)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(text, closed, strict=False))
        return CallPrompt(None, renderer.encode_rendered(text), restored, text[: len(list(pairs))])
    except (BadCallError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise anything about an agent's messages
        raise BadCallError(f"the chat template refuses these messages: {error}") from None


def encode_text(renderer: PromptRenderer, text: str, last_token: int | None) -> list[int]:
    """Encode the text of a call behind a sampled token; None: a whole prompt."""
    try:
        return renderer.encode_plain(text) if last_token is None else renderer.encode_after(text, last_token)
    except (TypeError, ValueError) as error:  # half a surrogate pair, which JSON allows
        raise BadCallError(f"the text cannot be tokenized: {error}") from None


def _require_shown(renderer: PromptRenderer, chat: Chat, after: int = 0) -> None:
    """Require that the template shows messages and tools.

    The first `after` messages are not checked. Thoughts may be left out, as templates do in earlier turns.
    """
    omissions = find_omissions(renderer, chat.messages, tools=chat.tools, variables=chat.variables)
    omissions = [part for part in omissions if not part.are_thoughts and not 0 < part.number <= after]
    if omissions:
        text = f"the chat template leaves out {', '.join(map(str, omissions))}, so the model would not see it"
        raise BadCallError(f"{text}; give a template that shows it in data.chat_template")


def _find_continued(messages: Sequence[ChatMessage], turns: Sequence[SampledTurn]) -> Iterator[SampledTurn]:
    """Find turns that messages continue, longest and newest first."""
    for turn in sorted(turns, key=lambda turn: -len(turn.history)):
        if is_continuation(messages, turn.history):
            yield turn


def _is_kept(renderer: PromptRenderer, turn: SampledTurn, chat: Chat) -> bool:
    """True if the template shows a response's path, behind the same prompt."""
    # A template may drop earlier thinking, or write the tools before the newest question. The model has to see what
    # the template writes. A mark in the place of each sampled text shows whether the template kept the text.
    marked, marks = list(chat.messages), []
    for index in turn.path:
        marked[index], mark = mark_turn(chat.messages[index])
        marks.append(mark)
    try:
        text = renderer.render(marked, tools=chat.tools, variables=chat.variables)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - some templates refuse calls beside a text, so nothing is known of them
        return True
    return text.startswith(turn.rendered) and all(mark is None or mark in text for mark in marks)
