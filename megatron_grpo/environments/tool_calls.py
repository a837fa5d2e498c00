"""Checks that a parser reads the calls that a chat template writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_grpo.data.prompt_renderer import PromptRenderer

_QUESTION = {"role": "user", "content": "sample question"}


def find_unread_call(renderer: PromptRenderer, tool: str, parse: Callable[[str], list[str]]) -> str | None:
    """Describe a call that the template writes and the parser misses.

    Args:
        renderer: renders the conversations of the task.
        tool: name of a tool.
        parse: maps a response to the names of the tools that it calls.
    """
    call = write_call(renderer, tool)
    if call is None:
        return None
    try:
        names = parse(call)
    except Exception as error:  # noqa: BLE001 - parsers raise anything about calls of other models
        return f"{call!r}: {type(error).__name__}: {error}"
    return None if tool in names else repr(call)


def write_call(renderer: PromptRenderer, tool: str) -> str | None:
    """Write a turn that calls a tool, without the turn's end.

    None: the chat template writes no calls, or renders the prompt before them otherwise.
    """
    call = {"id": "call00000", "type": "function", "function": {"name": tool, "arguments": {"input": "1 + 2"}}}
    try:
        prompt = renderer.render([_QUESTION])
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        conversation = renderer.render([_QUESTION, turn], add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - a template may raise anything, also about calls, which it need not know
        return None
    text = conversation.removeprefix(prompt)
    if text == conversation or tool not in text:
        return None
    call_end = text.rindex("1 + 2") if "1 + 2" in text else text.rindex(tool)
    ends = (text.find(token, call_end) for token in _list_special_tokens(renderer.tokenizer))
    return text[: min((end for end in ends if end >= 0), default=len(text))].rstrip()


def _list_special_tokens(tokenizer: Any) -> list[str]:
    added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return [str(token) for token in added_tokens if token.special]
