"""What a server of megatron_grpo.serve, vLLM's own, answers to requests that are late, huge or foreign."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.generation.http_access import BODY_BYTES, HEAD_BYTES, REQUEST_S
from tests.integration.server_process import serving
from tests.integration.vllm_helpers import make_model

HOST, JSON = "Host: 127.0.0.1", "Content-Type: application/json"
HUGE = [f"X-{number}: {'x' * 4000}" for number in range(HEAD_BYTES // 4000 + 5)]


@pytest.mark.slow  # tests/unit/generation/test_http_access.py sends as many to a small application each time
def test_requests_that_are_late_huge_or_foreign_are_refused(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "model", seed=0), tmp_path / "log") as server:
        key = f"Authorization: Bearer {os.environ[TOKEN_VARIABLE]}"
        statuses = {
            401: [HOST, JSON],
            403: [HOST, key, JSON, "Origin: https://evil.example"],
            413: [HOST, key, JSON, f"Content-Length: {BODY_BYTES + 1}"],
            415: [HOST, key, "Content-Type: text/plain"],
            421: ["Host: evil.example", key, JSON],
            431: [HOST, key, JSON, *HUGE],
        }
        found = {
            status: _status(server.port, lines, (BODY_BYTES + 1) * (status == 413))
            for status, lines in statuses.items()
        }
        assert found == {status: status for status in statuses}
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as late:
            late.sendall(b"POST /pause HTTP/1.1\r\n")
            assert _status(server.port, [HOST, key, JSON, "Content-Length: 9"], body=1) == 408
            with suppress(ConnectionResetError):
                assert late.recv(100) == b"", "a late head is closed without an answer"
        assert REQUEST_S / 2 < time.monotonic() - begun < 2 * REQUEST_S


def _status(port: int, lines: Sequence[str], body: int = 0) -> int:
    """Status of a POST with these headers and as many bytes of a body."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with suppress(ConnectionError):  # it may be answered before all is sent
            connection.sendall("\r\n".join(["POST /pause HTTP/1.1", *lines, "", ""]).encode())
            connection.sendall(b" " * body)
        return int(connection.recv(100).split()[1])
