"""Finds what a chat template leaves out of a conversation: messages, thoughts, calls, definitions of tools."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron_grpo.data.chat_messages import REASONING, ChatMessage, is_open
from megatron_grpo.data.prompt_renderer import PromptRenderer

_THOUGHTS = "the thoughts of "


class Omission(NamedTuple):
    """A part of a conversation that the template does not show.

    Example: Omission(2, "assistant", "the call of add in ")
    """

    number: int  # of the message, from 1; 0: definitions of tools
    role: str
    part: str = ""  # part of the message; empty: its content

    @property
    def are_thoughts(self) -> bool:
        return self.part == _THOUGHTS

    def __str__(self) -> str:
        return f"{self.part}message {self.number}, of the role {self.role}" if self.number else "the tools"


def find_omissions(
    renderer: PromptRenderer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[ChatMessage] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[Omission]:
    """Find what the template leaves out of a conversation, in order.

    `tools`: the conversation's own; None: it has the settings', which are checked at the start. Empty also where the
    template refuses the conversation.
    """
    # Every part is replaced by a mark of its own, so one rendering shows what is left out, wherever a template puts it.
    marked, marks = list[ChatMessage](), dict[str, Omission]()

    def mark(number: int, part: str = "") -> str:
        text = f"mark{secrets.token_hex(8)}"
        marks[text] = Omission(number, str(messages[number - 1].get("role")), part)
        return text

    for number, message in enumerate(messages, start=1):
        marked.append(_mark_message(renderer.read(message, number), partial(mark, number)))
    render = partial(renderer.render, marked, variables=variables, add_generation_prompt=not is_open(messages))
    try:
        text = render(tools=tools)
        has_tools = not tools or text != render(tools=[])
    except Exception:  # noqa: BLE001 - a template may raise anything; the rendering of the real text reports it
        return []
    omissions = dict.fromkeys(omission for mark, omission in marks.items() if mark not in text)
    return [*omissions] if has_tools else [*omissions, Omission(0, "")]


def _mark_message(message: dict[str, Any], mark: Callable[..., str]) -> dict[str, Any]:
    content, thoughts = message["content"], [name for name in REASONING if message.get(name)]
    if thoughts:
        message |= dict.fromkeys(thoughts, mark(_THOUGHTS))
    if isinstance(content, list):
        message["content"] = [{"type": "text", "text": mark()}]
    elif content and content.strip():
        message["content"] = mark()
    if "tool_calls" in message:
        message["tool_calls"] = [_mark_call(call, mark) for call in message["tool_calls"]]
    return message


def _mark_call(call: Any, mark: Callable[[str], str]) -> Any:
    """Put a mark in place of a call's arguments."""
    # Not of its name: Kimi's template writes the id instead.
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    marked = {**function, "arguments": {"value": mark(f"the call of {function.get('name')} in ")}}
    return {**call, "function": marked} if "function" in call else marked
