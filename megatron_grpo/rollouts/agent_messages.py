"""Messages of agents: whether they repeat the model's own, and marks that show what a chat template keeps of these."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from megatron_grpo.data.chat_messages import REASONING, ChatMessage, join_content, normalize_message
from megatron_grpo.data.prompt_renderer import MODEL_TURN

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
    fields = {name: value for name, value in normalize_message(message, number).items() if value not in (None, "")}
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
