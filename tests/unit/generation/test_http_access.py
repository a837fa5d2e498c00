"""Requests to a live server behind the guard, as programs, pages of a browser and rebound names send them."""

import http.client
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.generation.http_access import HEAD_BYTES, NAMES_VARIABLE, TokenCheck

BOTH_PARSERS = pytest.mark.parametrize("port", ["httptools", "h11"], indirect=True)
JSON = {"Content-Type": "application/json"}
KEY = {"Authorization": "Bearer right"}


async def application(request: Request) -> Response:
    """Answer everything with 200 and the body of the request."""
    return Response(await request.body())


@pytest.fixture
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of an application that is served and guarded as vLLM's is."""
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    monkeypatch.setenv(NAMES_VARIABLE, "127.0.0.1 vllm-0.svc")
    listening = socket.create_server(("127.0.0.1", 0))
    app = FastAPI()
    app.add_api_route("/{path:path}", application, methods=["GET", "POST", "OPTIONS"])
    app.add_middleware(TokenCheck)
    config = uvicorn.Config(app, log_level="error", http=getattr(request, "param", "auto"))
    server = app.state.server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listening.getsockname()[1]
    server.should_exit = server.force_exit = True  # without waiting for connections that are kept
    thread.join(10)


def ask_server(port: int, method: str, path: str, headers: dict[str, str], body: str | None = None) -> tuple[int, str]:
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
    actual, text = ask_server(port, method, path, headers, body)
    assert actual == status
    if status != 200:
        assert json.loads(text)["error"]["message"]


def test_a_body_arrives_whole(port: int) -> None:
    text = "x" * 300_000
    assert ask_server(port, "POST", "/inference", {**KEY, **JSON}, text) == (200, text)


@pytest.mark.parametrize("length", ["Content-Length: 5000", "Transfer-Encoding: chunked"])
def test_a_huge_body_gets_413(port: int, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.generation.http_access.BODY_BYTES", 1000)
    piece = b"x" * 500 if "Length" in length else b"1f4\r\n" + b"x" * 500 + b"\r\n"
    assert send_lines(port, length, *[piece] * 10) == 413


def test_a_slow_body_gets_408_and_others_are_served(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.generation.http_access.REQUEST_S", 0.5)
    assert send_lines(port, "Content-Length: 1000", *[b" "] * 200, pause_s=0.05) == 408
    assert ask_server(port, "GET", "/weight_info", KEY)[0] == 200


@BOTH_PARSERS
def test_a_huge_head_gets_431(port: int) -> None:
    pieces = [f"X-{number}: {'x' * 1000}\r\n".encode() for number in range(HEAD_BYTES // 1000 + 100)]
    status = send_lines(port, "X: x", *pieces, ended=False)
    assert status in (431, 400, RESET), "h11 has a limit of its own, with 400"
    assert ask_server(port, "GET", "/weight_info", KEY)[0] == 200


@BOTH_PARSERS
def test_a_huge_head_that_comes_complete_gets_431(port: int) -> None:
    """The parser sees its end before anything has counted its bytes."""
    assert send_lines(port, "\r\n".join(["X: x", f"Y: {'y' * HEAD_BYTES}"])) in (431, 400)
    assert ask_server(port, "GET", "/weight_info?" + "x" * (HEAD_BYTES + 1), KEY)[0] in (431, 400)
    assert ask_server(port, "GET", "/weight_info", KEY)[0] == 200


@BOTH_PARSERS
@pytest.mark.parametrize("slow_at", ["first head", "second head", "nothing"])
def test_a_slow_head_is_closed_and_others_are_served(port: int, slow_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.generation.http_access.REQUEST_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        if slow_at == "second head":
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in connection.recv(1000)
        begun = time.monotonic()
        connection.sendall(b"" if slow_at == "nothing" else b"GET /weight_info HTTP/1.1\r\nHost: localhost\r\n")
        while not select.select([connection], [], [], 0.05)[0]:
            assert time.monotonic() - begun < 10
            connection.sendall(b"" if slow_at == "nothing" else b"X: x\r\n")
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b"", "it is closed without an answer"
    assert ask_server(port, "GET", "/weight_info", KEY)[0] == 200


@BOTH_PARSERS
def test_a_kept_connection_is_not_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.generation.http_access.REQUEST_S", 0.3)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    for _ in range(3):
        connection.request("GET", "/weight_info", headers=KEY)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        time.sleep(0.5)


RESET = 0
"""In place of a status: the connection was reset."""


def send_lines(port: int, length: str, *pieces: bytes, pause_s: float = 0.0, ended: bool = True) -> int:
    """The status of a request in pieces, whose first may end its head; reads while it writes."""
    head = [
        "POST /inference HTTP/1.1",
        "Host: localhost",
        *(f"{name}: {value}" for name, value in {**KEY, **JSON}.items()),
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("\r\n".join([*head, length, *[""] * (2 if ended else 1)]).encode())
        for piece in pieces:
            if select.select([connection], [], [], pause_s)[0]:
                break
            with suppress(ConnectionError):  # the server has answered and closed; the answer is still there to be read
                connection.sendall(piece)
        try:
            return int(connection.recv(100).split()[1])
        except ConnectionResetError:  # closed with bytes of the request unread, which discards the answer
            return RESET


def test_a_server_whose_connections_cannot_be_bounded_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    app = FastAPI()
    app.add_middleware(TokenCheck)
    with pytest.raises(SystemExit):
        uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical")).run()


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=f"needs a token in {TOKEN_VARIABLE}"):
        TokenCheck(FastAPI())
