"""Malformed calls of agents: whatever a field holds, the endpoint answers, and a wrong type is the caller's mistake.

Which types a field may have is read from the annotations of OpenAI's own client.
"""

import gzip
import json
import typing
from collections import Counter
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal

import aiohttp
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from typing_extensions import is_typeddict

from megatron_grpo.rollouts.chat_protocol import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSES_FIELDS
from tests.support.asked_endpoint import Engine, begin_talk, open_endpoint
from tests.support.asked_endpoint import model as model  # a fixture

MESSAGES = [{"role": "user", "content": "a"}]
PROTOCOLS: dict[str, tuple[frozenset[str], dict[str, Any], Any]] = {
    "chat/completions": (CHAT_FIELDS, {"messages": MESSAGES}, ChatParams),
    "completions": (COMPLETION_FIELDS, {"prompt": "a"}, CompletionParams),
    "responses": (RESPONSES_FIELDS, {"input": "a"}, ResponseParams),
}
# Fields that OpenAI has elsewhere, or not.
OWN_KINDS: dict[str, set[type]] = {
    "chat_template_kwargs": {dict},
    "reasoning_effort": {str},
    "stream": {bool},
    "frequency_penalty": {int, float},
    "presence_penalty": {int, float},
}
VALUES = [
    *("null", "true", "false", "0", "-1", "1.5", "1e999", "NaN", "-Infinity", "1" + "0" * 400, "9" * 5000),
    *('""', '"x"', '"\\ud800"', '"\\u0000\\u001b[2J"', '["x"]', '{"a": 1}', "[]", "{}", "[1]", "[null]", "[{}]"),
    *("[[]]", "[" * 90 + "]" * 90, '{"a":' * 150 + "1" + "}" * 150, "[" * 5000 + "]" * 5000, '[{"role": "user"}]'),
    *('{"role": {}}', '[{"role": "user", "content": {}}]', '[{"type": "image_url"}]', '{"effort": 1, "format": 1}'),
]
ITEM_FIELDS = ("type", "role", "content", "summary", "name", "arguments", "call_id", "output")
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
    {"type": "reasoning", "summary": []},
]


def list_kinds(annotation: Any) -> set[type]:
    """JSON types of values with this annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is object:
        return {NoneType, bool, int, float, str, list, dict}
    if origin is Literal:
        return {*map(type, arguments)}
    if origin in (typing.Union, UnionType):
        return set().union(*map(list_kinds, arguments))
    if origin in (typing.Required, typing.Annotated):
        return list_kinds(arguments[0])
    if annotation is float:
        return {int, float}
    if annotation in (bool, int, str, NoneType):
        return {annotation}
    return {dict} if is_typeddict(annotation) or origin is dict else {list}


def iterate_calls() -> Iterator[tuple[str, bytes, bool]]:
    """Path, body, and whether the type of the changed field is one that OpenAI's client does not know."""

    def write(call: dict[str, Any], value: str) -> bytes:
        return json.dumps(call).replace('"<value>"', value).encode()

    for path, (fields, base, parameters) in PROTOCOLS.items():
        hints = typing.get_type_hints(parameters)
        for field in sorted(fields):
            kinds = list_kinds(hints[field]) if field in hints else OWN_KINDS[field]
            for value in VALUES:
                try:
                    is_wrong = type(json.loads(value)) not in {*kinds, NoneType}
                except (ValueError, RecursionError):
                    is_wrong = True
                yield path, write({**base, field: "<value>"}, value), is_wrong
    for value in VALUES:
        for field in ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "function_call"):
            yield "chat/completions", write({"messages": [{**MESSAGES[0], field: "<value>"}]}, value), False
        for field in ("id", "type", "function"):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, field: "<value>"}
            yield "chat/completions", write({"messages": [{"role": "assistant", "tool_calls": [call]}]}, value), False
        for field in ("name", "arguments"):
            function = {"name": "f", "arguments": "{}", field: "<value>"}
            call = {"id": "1", "type": "function", "function": function}
            yield "chat/completions", write({"messages": [{"role": "assistant", "tool_calls": [call]}]}, value), False
        for item in ITEMS:
            for field in ITEM_FIELDS:
                yield "responses", write({"input": [{**item, field: "<value>"}]}, value), False


async def test_no_call_is_an_error_of_the_server(model: str) -> None:
    statuses: Counter[int] = Counter()
    kind = {"Content-Type": "application/json"}
    async with open_endpoint(model) as endpoint, aiohttp.ClientSession(headers=kind) as session:
        for path, body, is_wrong in iterate_calls():
            talk = begin_talk(endpoint, Engine())
            with endpoint.open_rollout(talk) as access:
                async with session.post(f"{access.base_url}/{path}", data=body) as reply:
                    text = await reply.text()
            assert reply.status in ((400,) if is_wrong else (200, 400)), (path, body[:200], text[:300])
            assert len(text) < 5000, (path, body[:200])
            assert len(talk.responses) == ((json.loads(body).get("n") or 1) if reply.status == 200 else 0)
            statuses[reply.status] += 1
    assert sum(statuses.values()) >= 1200
    assert statuses[200] >= 100


@pytest.mark.parametrize("path", PROTOCOLS)
async def test_bodies_and_methods(model: str, path: str) -> None:
    full_body = json.dumps(PROTOCOLS[path][1]).encode()
    cases: list[tuple[str, dict[str, str], bytes, int]] = [
        ("POST", {}, full_body, 200),
        ("POST", {"Content-Encoding": "gzip"}, gzip.compress(full_body), 200),
        ("POST", {"Content-Encoding": "gzip"}, gzip.compress(full_body)[:-12], 400),
        ("POST", {"Content-Encoding": "gzip"}, full_body, 400),
        ("POST", {"Content-Type": "text/plain"}, full_body, 415),
        ("POST", {"Content-Type": "multipart/form-data; boundary=a"}, full_body, 415),
        ("POST", {"Content-Type": "application/json; charset=utf-16"}, full_body, 200),
        *(
            ("POST", {}, body, 400)
            for body in (b"", full_body[:-1], full_body + b"}", b"[]", b'"a"', b"1", b"\xff\xfe", b"\0")
        ),
        *((method, {}, full_body, 405) for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS")),
    ]
    connector = aiohttp.TCPConnector(force_close=True)  # one with a broken body is closed behind its answer
    async with open_endpoint(model) as endpoint, aiohttp.ClientSession(connector=connector) as session:
        for method, headers, body, status in cases:
            with endpoint.open_rollout(begin_talk(endpoint, Engine())) as access:
                options = {"data": body, "headers": {"Content-Type": "application/json", **headers}}
                async with session.request(method, f"{access.base_url}/{path}", **options) as reply:
                    assert reply.status == status, (method, headers, body[:100], await reply.text())
