"""Whether a Ray cluster answers at an address, found out without Ray: it retries for minutes before it says no."""

from __future__ import annotations

import os
import re
import socket

AUTO = "auto"
"""The cluster that Ray itself finds on this machine."""
PROBE_S = 5.0
"""Deadline for the connection, and again for the answer."""
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})")
# What opens an HTTP/2 connection (RFC 9113, 3.4): a line of text and an empty SETTINGS frame; gRPC speaks nothing else.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER_BYTES, _FRAME_TYPE_AT, _SETTINGS = 9, 3, 4


def malformed(address: str) -> str | None:
    """What is wrong with the form of an address; None: nothing."""
    match = _ADDRESS.fullmatch(address)
    if address == AUTO or (match and 0 < int(match["port"]) < 2**16):
        return None
    return "is no address; give HOST:PORT, or auto for the cluster on this machine, or null to start one for this run"


def unreachable(address: str, timeout_s: float = PROBE_S) -> str | None:
    """Why no Ray head answers at an address of the right form; None: one does, or Ray has to find out itself."""
    match = _ADDRESS.fullmatch(address)
    if match is None or os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    try:
        with socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_HTTP2_PREFACE)
            answer = b""
            while len(answer) < _FRAME_HEADER_BYTES and (more := connection.recv(_FRAME_HEADER_BYTES - len(answer))):
                answer += more
    except TimeoutError:
        return f"nothing answers within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    if len(answer) < _FRAME_HEADER_BYTES or answer[_FRAME_TYPE_AT] != _SETTINGS:
        return "what answers there is not Ray"
    return None
