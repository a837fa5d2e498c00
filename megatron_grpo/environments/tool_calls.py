"""Whether a parser of tool calls reads what a model's chat template writes for a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_grpo.data.prompt_renderer import PromptRenderer

_QUESTION = {"role": "user", "content": "sample question"}


def find_unread_call(renderer: PromptRenderer, tool: str, parse: Callable[[str], list[str]]) -> str | None:
    """The text of a call that a parser does not find, with the reason; None: it is found, or not to be had.

    Args:
        renderer: renders the conversations of the task.
        tool: name of a tool.
        parse: function from a response to the names of the tools that it calls.
    """
    written = write_call(renderer, tool)
    if written is None:
        return None
    try:
        names = parse(written)
    except Exception as error:  # noqa: BLE001 - parsers raise anything about calls of other models
        return f"{written!r}: {type(error).__name__}: {error}"
    return None if tool in names else repr(written)


def write_call(renderer: PromptRenderer, tool: str) -> str | None:
    """The text of a model's turn that calls a tool, as the chat template writes it, without the end of the turn.

    None: the template shows no calls, or renders the prompt before them otherwise.
    """
    call = {"id": "call00000", "type": "function", "function": {"name": tool, "arguments": {"input": "1 + 2"}}}
    try:
        prompt = renderer.render([_QUESTION])
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = renderer.render([_QUESTION, turn], add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - a template may raise anything, also about calls, which it need not know
        return None
    text = whole.removeprefix(prompt)
    if text == whole or tool not in text:
        return None
    call_end = text.rindex("1 + 2") if "1 + 2" in text else text.rindex(tool)
    ends = [place for end in _special_texts(renderer.tokenizer) if (place := text.find(end, call_end)) >= 0]
    return text[: min(ends, default=len(text))].rstrip()


def _special_texts(tokenizer: Any) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return [str(token) for token in added if token.special]
