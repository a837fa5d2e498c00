"""Addresses that a user gives, and who is let through to a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_grpo.config.paths import TOKEN_VARIABLE, is_loopback, url_problem
from megatron_grpo.sampler.endpoint import TokenGuard


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.0.3", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_which_hosts_only_this_machine_reaches(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "https://node-3.cluster:443/", "http://[::1]:9", "http://host"]
)
def test_urls_of_servers(url: str) -> None:
    assert url_problem(url) is None


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("node3:8000", "has the scheme 'node3'"),
        ("ftp://node3:8000", "has the scheme 'ftp'"),
        ("//node3", "has no scheme"),
        ("http://", "names no host"),
        ("http://node3:0", "names no host or port"),
        ("http://node3:99999", "is no URL"),
        ("http://me:secret@node3:8000", "holds a password"),
        ("http://node3:8000/v1", "more than a host and a port"),
    ],
)
def test_what_is_no_url_of_a_server(url: str, text: str) -> None:
    problem = url_problem(url)
    assert problem is not None
    assert text in problem


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/collective_rpc", b"Bearer right", 200),
        ("/collective_rpc", b"Bearer wrong", 401),
        ("/collective_rpc", b"right", 401),
        ("/v1/completions", None, 401),
        ("/health", None, 200),
    ],
)
def test_the_guard_lets_the_token_through(
    path: str, header: bytes | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    assert _status(TokenGuard(_ok), path, header) == status


def test_without_a_token_everybody_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert _status(TokenGuard(_ok), "/collective_rpc", None) == 200


async def _ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def _status(app: TokenGuard, path: str, header: bytes | None) -> int:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [] if header is None else [(b"authorization", header)]
    asyncio.run(app({"type": "http", "path": path, "headers": headers}, None, send))
    return int(sent[0]["status"])
