"""The groups of a refit with real processes: everybody meets, and a missing peer ends in an error, not a hang."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from megatron_grpo.platform.device import open_store
from megatron_grpo.weights.refit import groups
from megatron_grpo.weights.refit.broadcast import BroadcastReceiver, StageLinks, send_tensors, write_plan
from megatron_grpo.weights.refit.buckets import plan_buckets
from megatron_grpo.weights.refit.groups import Rendezvous
from megatron_grpo.weights.refit.transport import SETTLE_S
from tests.support.refit_models import made_up_worker

CPU = torch.device("cpu")
SPECS = [("w", "float32", (1000,)), ("b", "float32", (3,))]


def test_a_receiver_gets_what_the_sender_packs() -> None:
    store, rendezvous = _open(timeout_s=120.0)
    sent = {"w": torch.randn(1000), "b": torch.randn(3)}
    with _Receiver(rendezvous) as results:
        buckets = plan_buckets(SPECS, 2048)
        store.set("stages", "1")
        write_plan(store, 0, SPECS, 2048)
        links = StageLinks(rendezvous, {0: buckets}, 0, CPU)
        nbytes, *counts = send_tensors(links, sent.items(), version=3)
        received = results.get(timeout=120)
    assert nbytes == sum(bucket.nbytes for bucket in buckets)
    assert counts == [2, 2]
    assert received == {name: tensor.tolist() for name, tensor in sent.items()}


def test_nobody_to_receive_is_an_error_at_the_timeout() -> None:
    _store, rendezvous = _open(timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        groups.join(rendezvous, "stage 0", 0, 2, CPU)
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


class _Receiver:
    """A receiving process; its results come through a queue."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        context = multiprocessing.get_context("spawn")
        self._results = context.Queue()
        self._process = context.Process(target=_receive, args=(rendezvous, self._results), daemon=True)

    def __enter__(self) -> Any:
        self._process.start()
        return self._results

    def __exit__(self, *_: object) -> None:
        self._process.join(timeout=10)
        self._process.kill()


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = torch.nn.Parameter(torch.zeros(1))
        self.received: dict[str, Any] = {}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.received |= {name: tensor.tolist() for name, tensor in tensors}


def _receive(rendezvous: Rendezvous, results: Any) -> None:
    model = _Model()
    BroadcastReceiver(made_up_worker(model), rendezvous, 0).receive(3)
    results.put(model.received)
