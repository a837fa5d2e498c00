"""Forms of the fields of an agent's call: a call is checked field by field before anything reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_grpo.data.chat_messages import REASONING
from megatron_grpo.data.prompt_renderer import RESERVED
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.conversation import OPEN_CALLS

MOST_STOPS = 4  # texts that may end a call's response, as in OpenAI's protocol
_CONTENTS = ("messages", "prompt", "input")  # a call needs the one of its protocol


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a field: words for a message, and a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_list_of(value_type: type, values: Any) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {value_type}


def _is_content(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and {*map(type, value)} <= {dict, str})


def _are_stops(value: Any) -> bool:
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= MOST_STOPS and all(isinstance(stop, str) and stop for stop in stops)


def _is_tool_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(value.get("id") or "", str):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments") or "", str | dict)


_TEXT = _Form("a text", lambda value: isinstance(value, str))
_FLAG = _Form("true or false", lambda value: isinstance(value, bool))
_NUMBER = _Form("a number", lambda value: type(value) in (int, float))
_COUNT = _Form("a number above 0", lambda value: type(value) is int and value > 0)
_OBJECT = _Form("an object", lambda value: isinstance(value, dict))
_FORMS = {
    **dict.fromkeys(("model", "user", "service_tier", "safety_identifier", "prompt_cache_key"), _TEXT),
    **dict.fromkeys(("reasoning_effort", "instructions", "previous_response_id", "truncation"), _TEXT),
    **dict.fromkeys(("stream", "store", "parallel_tool_calls"), _FLAG),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens", "max_output_tokens"), _COUNT),
    **dict.fromkeys(("metadata", "stream_options", "response_format", "reasoning", "text"), _OBJECT),
    "messages": _Form("a list of objects", lambda value: bool(value) and _is_list_of(dict, value)),
    "prompt": _Form(
        "a text or a list of token ids",
        lambda value: isinstance(value, str) or (bool(value) and _is_list_of(int, value)),
    ),
    "input": _Form("a text or a list of items", lambda value: isinstance(value, str) or _is_list_of(dict, value)),
    "tools": _Form("a list of objects", lambda value: _is_list_of(dict, value)),
    "tool_choice": _Form("a text or an object", lambda value: isinstance(value, str | dict)),
    "include": _Form("a list of texts", lambda value: _is_list_of(str, value)),
    **dict.fromkeys(("logprobs", "top_logprobs"), _Form("a number", lambda value: type(value) is int)),
    "stop": _Form(f"a text or a list of at most {MOST_STOPS} texts", _are_stops),
    "chat_template_kwargs": _Form(
        f"an object with variables of the chat template, none of them {', '.join(sorted(RESERVED))}",
        lambda value: isinstance(value, dict) and not RESERVED & value.keys(),
    ),
}
_CHAT_FORMS = _FORMS | {"logprobs": _FLAG}  # a number in completions
_MEMBER_FORMS = {  # of members of objects, by field
    "reasoning": {"effort": _TEXT, "summary": _TEXT},
    "stream_options": {"include_usage": _FLAG},
    "text": {"format": _OBJECT},
}
_MESSAGE_FORMS = {
    **dict.fromkeys(("name", "tool_call_id", *REASONING), _TEXT),
    "content": _Form("a text or a list of parts", _is_content),
    "function_call": _Form("a call of a function", lambda value: _is_tool_call({"function": value})),
    "tool_calls": _Form(
        "a list of calls of functions", lambda value: isinstance(value, list) and all(map(_is_tool_call, value))
    ),
}


def require_fields(call: Any, accepted: frozenset[str]) -> dict[str, Any]:
    """Check the forms of a call's fields; returns the fields that are not null.

    BadCallError names the first field that is not accepted, is missing, or is of another form.
    """
    if not isinstance(call, dict):
        raise BadCallError("the request is not a JSON object")
    fields = {name: value for name, value in call.items() if value is not None}
    if unknown := ", ".join(sorted(fields.keys() - accepted)):
        raise BadCallError(f"{unknown}: not accepted; the run's configuration (generation) decides how rollouts sample")
    needed = {name: None for name in _CONTENTS if name in accepted}
    _require_forms({**needed, **fields}, _CHAT_FORMS if "messages" in accepted else _FORMS, "")
    for name, forms in _MEMBER_FORMS.items():
        members = {key: value for key, value in fields.get(name, {}).items() if value is not None}
        _require_forms(members, forms, f"{name}.")
    if fields.get("n", 1) > OPEN_CALLS:
        raise BadCallError(f"n={fields['n']}: at most {OPEN_CALLS} responses at a time")
    return fields


def require_messages(messages: Iterable[Mapping[str, Any]]) -> None:
    """Require messages with a role, and fields of their form; BadCallError."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message.get("role"), str):
            raise BadCallError(f"message {number} has no role; give system, user, assistant or tool")
        fields = {name: value for name, value in message.items() if value is not None}
        _require_forms(fields, _MESSAGE_FORMS, f"message {number}: ")


def _require_forms(fields: Mapping[str, Any], forms: Mapping[str, _Form], path: str) -> None:
    for name, value in fields.items():
        form = forms.get(name)
        if form is not None and not form.fits(value):
            figure = f"={value}" if isinstance(value, int | float) else ""
            raise BadCallError(f"{path}{name}{figure}: give {form.words}")
