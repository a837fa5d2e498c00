"""The groups of a refit with real processes: everybody meets, and a missing peer ends in an error, not a hang."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest
import torch

from megatron_grpo.platform.device import open_store
from megatron_grpo.weights.refit import groups
from megatron_grpo.weights.refit.broadcast import BucketSender, join_stage, read_plans, write_plan
from megatron_grpo.weights.refit.buckets import plan_buckets
from megatron_grpo.weights.refit.groups import Rendezvous
from megatron_grpo.weights.refit.transport import SETTLE_S

CPU = torch.device("cpu")
SPECS = [("w", "float32", (1000,)), ("b", "float32", (3,))]


def test_a_receiver_gets_what_the_sender_packs() -> None:
    store, rendezvous = _open(timeout_s=120.0)
    sent = {"w": torch.randn(1000), "b": torch.randn(3)}
    with _Receiver(rendezvous) as results:
        buckets = plan_buckets(SPECS, 2048)
        write_plan(store, 0, 1, buckets, 2048)
        group = join_stage(rendezvous, 0, 0, CPU)
        report = BucketSender(0, buckets, group, CPU).send(sent.items(), version=3)
        received = results.get(timeout=120)
    assert report.buckets == 2
    assert report.tensors == 2
    assert received == {name: tensor.tolist() for name, tensor in sent.items()}


def test_nobody_to_receive_is_an_error_at_the_timeout() -> None:
    _store, rendezvous = _open(timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        join_stage(rendezvous, 0, 0, CPU)
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


def _receive(rendezvous: Rendezvous, results: Any) -> None:
    (buckets,) = read_plans(rendezvous.store())
    group = join_stage(rendezvous, 0, 1, CPU)
    received = {}
    for bucket in buckets:
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        group.broadcast(buffer, root=0).wait()
        received |= {slot.name: slot.view(buffer).tolist() for slot in bucket.slots}
    results.put(received)
