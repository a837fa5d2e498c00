"""Clients of the endpoint that send foreign, huge or slow requests, or go away before the answer."""

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from megatron_grpo.rollouts.endpoint import Endpoint
from tests.support.asked_endpoint import SlowEngine, begin_talk, head, open_endpoint, open_rollout
from tests.support.asked_endpoint import model as model  # a fixture


async def send_pieces(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[int | None, float]:
    """Send a request in pieces; the answer's status and seconds. None: the connection was closed without an answer."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(reader.readline())
    for piece in pieces:
        if reading.done():
            break
        writer.write(piece)
        await asyncio.sleep(pause_s)
    try:
        line = await asyncio.wait_for(reading, 10)
    except ConnectionResetError:  # it was closed while the client wrote
        line = b""
    writer.close()
    return int(line.split()[1]) if line else None, time.monotonic() - began


MESSAGE = b'{"messages": [{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ([], MESSAGE + b"}", 200),
        ([], b"", 400),
        ([], MESSAGE, 400),
        ([], b"\xff\xfe{}", 400),
        ([], b"[" * 100_000, 400),
        ([], b'{"messages": ' + b"9" * 10_000 + b"}", 400),
        ([], b"null", 400),
        ([], MESSAGE + b', "max_tokens": 1e999}', 400),
        ([], MESSAGE + b', "max_tokens": true}', 400),
        ([], MESSAGE + b', "temperature": {}}', 400),
        ([], MESSAGE + b', "tools": {"a": 1}}', 400),
        ([], b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 200),
        ([], b'{"messages": [{"role": "user"}]}', 200),
        ([], b'{"messages": [{"role": "user", "content": [[]]}]}', 400),
        (["Content-Encoding: gzip"], b"no gzip", 400),
        (["Content-Type: application/json; charset=nonsense"], MESSAGE + b"}", 200),
        (["Authorization: Bearer \xff"], MESSAGE + b"}", 401),
        (["Origin: https://evil.example"], MESSAGE + b"}", 403),
        (["Content-Type: text/plain"], MESSAGE + b"}", 415),
        (["Host: evil.example:8000"], MESSAGE + b"}", 421),
    ],
)
async def test_malformed_and_foreign_requests_are_refused(
    model: str, headers: list[str], body: bytes, status: int
) -> None:
    async with open_rollout(model) as (_, access, endpoint):
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        key = [] if any("Authorization" in header for header in headers) else [f"Authorization: Bearer {access.token}"]
        assert (await send_pieces(endpoint.port, head(path, *headers, *key, length=len(body)) + body))[0] == status


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_another_method_gets_405(model: str, method: str) -> None:
    async with open_rollout(model) as (_, access, endpoint):
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        answer_head = head(path, f"Authorization: Bearer {access.token}", length=0)
        assert (await send_pieces(endpoint.port, answer_head.replace(b"POST", method.encode(), 1)))[0] == 405


@pytest.mark.parametrize("length", ["header", "chunks"])
async def test_a_huge_request_gets_413(model: str, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Endpoint.__module__}.BODY_BYTES", 1000)
    async with open_rollout(model) as (_, access, endpoint):
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        key = f"Authorization: Bearer {access.token}"
        pieces = [head(path, key, length=5000) + b"x" * 5000]
        if length == "chunks":
            chunked = head(path, key, length=0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            pieces = [chunked, *[b"1f4\r\n" + b"x" * 500 + b"\r\n"] * 10, b"0\r\n\r\n"]
        assert (await send_pieces(endpoint.port, *pieces))[0] == 413


@pytest.mark.parametrize(("part", "status"), [("head", None), ("body", 408)])
async def test_a_slow_request_is_ended(
    model: str, part: str, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Endpoint.__module__}.REQUEST_S", 0.5)
    async with open_rollout(model) as (client, access, endpoint):
        path = f"{access.base_url.partition(str(endpoint.port))[2]}/chat/completions"
        request_head = head(path, f"Authorization: Bearer {access.token}", length=1000)
        pieces = [request_head] if part == "body" else []
        slow = [bytes([byte]) for byte in (b" " * 200 if part == "body" else request_head)]
        actual = await send_pieces(endpoint.port, *pieces, *slow, pause_s=0.05)
        messages: list[Any] = [{"role": "user", "content": "a"}]
        await client.chat.completions.create(model=access.model, messages=messages)
        actual, seconds = actual
    assert actual == status
    assert seconds < 5


async def test_half_open_connections_are_bounded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{Endpoint.__module__}.IDLE_CONNECTIONS", 5)
    monkeypatch.setattr(f"{Endpoint.__module__}.REQUEST_S", 5.0)
    async with open_rollout(model) as (_, _, endpoint):
        opened = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(20)]
        for _, writer in opened:
            writer.write(b"POST / HTTP/1.1\r\n")
        await asyncio.sleep(2)
        closed = [reader.at_eof() for reader, _ in opened]
        for _, writer in opened:
            writer.close()
        assert closed == [True] * 15 + [False] * 5, "the oldest are closed"


async def settle(engine: SlowEngine, cancelled: int) -> None:
    async with asyncio.timeout(30):
        while engine.cancelled < cancelled:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("choices", "stuck"), [(1, range(1)), (8, range(5, 8))])
async def test_what_a_client_gave_up_on_is_not_trained_on(
    model: str, choices: int, stuck: range, is_streamed: bool
) -> None:
    """A time-out of the client's own, and its repetition."""
    engine = SlowEngine(stuck)
    call: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "n": choices, "stream": is_streamed}
    async with open_endpoint(model) as endpoint:
        talk = begin_talk(endpoint, engine)
        with endpoint.open_rollout(talk) as access:
            client = AsyncOpenAI(base_url=access.base_url, api_key=access.token, max_retries=0)
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model=access.model, timeout=0.6, **call)
            await settle(engine, len(stuck))
            assert talk.responses == [], "neither those that were complete nor the others"
            answer = await client.chat.completions.create(model=access.model, **call)
            if is_streamed:
                assert [chunk async for chunk in answer]
            assert len(talk.responses) == choices
            assert len(talk.list_segments()) == choices
            assert talk.failure is None


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_a_client_that_went_away_leaves_no_response(model: str, path: str) -> None:
    """A process that ends in its call: a bare connection that is closed, at once or while the model writes."""
    engine = SlowEngine(range(1))
    key = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    content: Any = [{"role": "user", "content": "ab"}] if key == "messages" else "ab"
    body = json.dumps({"model": "policy", key: content}).encode()
    async with open_endpoint(model) as endpoint:
        talk = begin_talk(endpoint, engine)
        with endpoint.open_rollout(talk) as access:
            target = access.base_url.partition(f":{endpoint.port}")[2]
            for stuck in (1, 0):
                _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
                writer.write(head(f"{target}/{path}", length=len(body)) + body)
                while stuck and not engine.calls:
                    await asyncio.sleep(0.01)
                writer.close()
                await settle(engine, 1)
                await asyncio.sleep(0.1)
                assert (talk.responses, engine.cancelled) == ([], 1)
