"""Addresses that a user gives: which of them only this machine reaches, and what is wrong with a URL."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"
"""Environment variable with the bearer token of servers and of the endpoint. In no file of a run."""


def token() -> str | None:
    """The bearer token of this process's environment; None: there is none."""
    return os.environ.get(TOKEN_VARIABLE) or None


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach a server that listens on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def url_problem(url: str) -> str | None:
    """What is wrong with the URL of a server; None: nothing."""
    text = "give http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL: {error}; {text}"
    if parts.scheme not in ("http", "https"):
        return f"has the scheme {parts.scheme!r}; {text}" if parts.scheme else f"has no scheme; {text}"
    if not parts.hostname or port == 0:
        return f"names no host or port; {text}"
    if parts.username is not None or parts.password is not None:
        return f"holds a password, which would be in the run's files; set {TOKEN_VARIABLE} in the environment"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return f"has more than a host and a port; {text}"
    return None
