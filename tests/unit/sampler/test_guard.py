"""Requests to a live server behind the guard, as programs, pages of a browser and rebound names send them."""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.sampler.guard import NAMES_VARIABLE, TokenGuard

JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer right"}


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer everything with 200 and the body of the request."""
    if scope["type"] == "http":
        pieces = [await receive()]
        while pieces[-1].get("more_body"):
            pieces.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"".join(piece.get("body", b"") for piece in pieces)})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    monkeypatch.setenv(NAMES_VARIABLE, "127.0.0.1 vllm-0.svc")
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(TokenGuard(application), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def answered(port: int, method: str, path: str, headers: dict[str, str], body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/collective_rpc", {**KEY, **JSON}, 200),
        ("POST", "/collective_rpc", {**KEY, "Content-Type": "application/json; charset=utf-8"}, 200),
        ("GET", "/weight_info", KEY, 200),
        ("GET", "/weight_info", {**KEY, "Host": "localhost:8000"}, 200),
        ("GET", "/weight_info", {**KEY, "Host": "[::1]:8000"}, 200),
        ("GET", "/weight_info", {**KEY, "Host": "10.1.2.3"}, 200),
        ("GET", "/weight_info", {**KEY, "Host": "VLLM-0.svc:8000"}, 200),
        ("GET", "/weight_info", {**KEY, "Host": socket.gethostname()}, 200),
        ("GET", "/health", {}, 200),
        # No token
        ("GET", "/weight_info", {}, 401),
        ("POST", "/collective_rpc", JSON, 401),
        ("POST", "/collective_rpc", {**JSON, "Authorization": "Bearer wrong"}, 401),
        ("POST", "/collective_rpc", {**JSON, "Authorization": "right"}, 401),
        ("POST", "/collective_rpc", {**JSON, "Authorization": "Bearer r\u00efght"}, 401),
        ("GET", "/health/../weight_info", {}, 401),
        # A page that sends requests (CSRF), the browser's question beforehand, and forms
        ("POST", "/collective_rpc", {**KEY, **JSON, "Origin": "https://evil.example"}, 403),
        ("POST", "/collective_rpc", {**KEY, **JSON, "Origin": "null"}, 403),
        ("OPTIONS", "/collective_rpc", {"Origin": "https://evil.example"}, 403),
        ("GET", "/health", {"Origin": "https://evil.example"}, 403),
        ("POST", "/collective_rpc", {**KEY, "Content-Type": "text/plain"}, 415),
        ("POST", "/collective_rpc", {**KEY, "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/collective_rpc", {**KEY, "Content-Type": "multipart/form-data; boundary=x"}, 415),
        ("POST", "/pause", KEY, 415),
        # A name of the page that leads here (DNS rebinding)
        ("GET", "/weight_info", {**KEY, "Host": "evil.example:8000"}, 421),
        ("GET", "/weight_info", {**KEY, "Host": "127.0.0.1.evil.example"}, 421),
        ("GET", "/weight_info", {**KEY, "Host": "localhost.evil.example"}, 421),
        ("GET", "/health", {"Host": "evil.example"}, 421),
    ],
)
def test_requests_get_the_right_status(port: int, method: str, path: str, headers: dict[str, str], status: int) -> None:
    body = None if method != "POST" else "{}"
    found, text = answered(port, method, path, headers, body)
    assert found == status
    if status != 200:
        assert json.loads(text)["error"]["message"]


def test_a_body_arrives_whole(port: int) -> None:
    text = "x" * 300_000
    assert answered(port, "POST", "/inference", {**KEY, **JSON}, text) == (200, text)


@pytest.mark.parametrize("length", ["Content-Length: 5000", "Transfer-Encoding: chunked"])
def test_a_huge_body_gets_413(port: int, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.sampler.guard.BODY_BYTES", 1000)
    piece = b"x" * 500 if "Length" in length else b"1f4\r\n" + b"x" * 500 + b"\r\n"
    assert sent(port, length, *[piece] * 10) == 413


def test_a_slow_body_gets_408_and_others_are_served(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.sampler.guard.REQUEST_S", 0.5)
    assert sent(port, "Content-Length: 1000", *[b" "] * 200, pause_s=0.05) == 408
    assert answered(port, "GET", "/weight_info", KEY)[0] == 200


def sent(port: int, length: str, *pieces: bytes, pause_s: float = 0.0) -> int:
    """The status of a request that is sent in pieces; reads the answer while it writes."""
    head = [
        "POST /inference HTTP/1.1",
        "Host: localhost",
        *(f"{name}: {value}" for name, value in {**KEY, **JSON}.items()),
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("\r\n".join([*head, length, "", ""]).encode())
        for piece in pieces:
            if select.select([connection], [], [], pause_s)[0]:
                break
            connection.sendall(piece)
        return int(connection.recv(100).split()[1])


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=f"needs a token in {TOKEN_VARIABLE}"):
        TokenGuard(application)
