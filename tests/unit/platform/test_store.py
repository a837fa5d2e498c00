"""A store that was closed is noticed at once, so that nobody takes a process that waits for it for a lost one."""

import time

import pytest

from megatron_grpo.platform.device import connect_store, open_store


def test_a_store_is_reached_at_its_address() -> None:
    store = open_store("127.0.0.1", 10.0)
    connect_store(store.host, store.port, 10.0).set("key", "value")
    assert store.get("key") == b"value"


def test_a_closed_store_is_noticed_at_once() -> None:
    store = open_store("127.0.0.1", 10.0)
    host, port = store.host, store.port
    del store
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"no store listens at {host}:{port}"):
        connect_store(host, port, 10.0)
    assert time.monotonic() - began < 5.0
