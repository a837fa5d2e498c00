"""Addresses that a user gives."""

from __future__ import annotations

import pytest

from megatron_grpo.config.paths import check_url, is_loopback


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
    assert check_url(url) is None


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("node3:8000", "has the scheme 'node3'"),
        ("ftp://node3:8000", "has the scheme 'ftp'"),
        ("//node3", "has no scheme"),
        ("http://", "names no host"),
        ("http://node3:0", "names no host or port"),
        ("http://node3:99999", "is not a URL"),
        ("http://node3:8000/v1", "more than a host and a port"),
    ],
)
def test_what_is_no_url_of_a_server(url: str, text: str) -> None:
    problem = check_url(url)
    assert problem is not None
    assert text in problem
