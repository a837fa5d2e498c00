"""The groups of a refit: a missing peer ends in an error, not a hang."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megatron_grpo.platform.device import open_store
from megatron_grpo.weights.refit import groups
from megatron_grpo.weights.refit.groups import Rendezvous
from megatron_grpo.weights.refit.transport import SETTLE_S


def test_nobody_to_receive_is_an_error_at_the_timeout() -> None:
    _store, rendezvous = _open(timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        groups.join(rendezvous, 0, 2, torch.device("cpu"))
    assert time.monotonic() - began < 10


def test_a_store_that_was_closed_is_not_sought_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes late to an attempt that has failed is back in time for the next one."""
    assert groups.REACH_S < SETTLE_S
    monkeypatch.setattr(groups, "REACH_S", 1.0)
    store, rendezvous = _open(timeout_s=60.0)
    del store
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1"):
        rendezvous.store()
    assert time.monotonic() - began < 20


def test_a_key_may_come_later_than_a_store_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "REACH_S", 0.5)
    store, rendezvous = _open(timeout_s=60.0)
    reader = rendezvous.store()
    threading.Timer(1.5, store.set, ("key", "value")).start()
    assert reader.get("key") == b"value"


def _open(timeout_s: float) -> tuple[Any, Rendezvous]:
    store = open_store("127.0.0.1", timeout_s)
    return store, Rendezvous(host="127.0.0.1", port=store.port, receivers=1, timeout_s=timeout_s)
