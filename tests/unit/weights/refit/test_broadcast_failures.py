"""Broadcasts over real groups, each member in a thread of its own: one that fails keeps nobody waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_grpo.platform.device import open_store
from megatron_grpo.weights.refit import broadcast as receiver
from megatron_grpo.weights.refit.broadcast import BroadcastReceiver, StageLinks, send_tensors, write_plan
from megatron_grpo.weights.refit.buckets import plan_buckets
from megatron_grpo.weights.refit.groups import Rendezvous
from tests.support.refit_models import made_up_worker

CPU = torch.device("cpu")
BUCKET_BYTES = 2**20
SPECS = [(f"w{number}", "float32", (BUCKET_BYTES // 4,)) for number in range(8)]
"""A bucket each: more than are under way at a time."""
RECEIVERS = 2


class MadeUpModel:
    """Loads whatever comes; a bad one fails at the second bucket, which vLLM's loader may do."""

    def __init__(self, bad: bool) -> None:
        self._bad, self._loaded = bad, 0

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._loaded += len(list(tensors))
        if self._bad and self._loaded == 2:
            raise KeyError("no such parameter")


Members = list[Callable[[], object]]


def _members(*, bad_sender: bool = False, bad_receiver: bool = False) -> Members:
    """What each member does in a refit, the sender first; all are connected, and stay until the last one is done."""
    store = open_store("127.0.0.1", 60.0)
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, receivers=RECEIVERS, timeout_s=60.0)
    buckets = plan_buckets(SPECS, BUCKET_BYTES)
    store.set("stages", "1")
    write_plan(store, 0, SPECS, BUCKET_BYTES)

    def receiving(number: int) -> BroadcastReceiver:
        model = MadeUpModel(bad_receiver and number == 0)
        return BroadcastReceiver(made_up_worker(model), rendezvous, number)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number, (name, _, shape) in enumerate(SPECS):
            if bad_sender and number == 4:
                raise RuntimeError("cannot be gathered")
            yield name, torch.ones(shape)

    with ThreadPoolExecutor(1 + RECEIVERS) as pool:
        receivers = [pool.submit(receiving, number) for number in range(RECEIVERS)]
        sender = StageLinks(rendezvous, {0: buckets}, 0, CPU)
    made = [one.result() for one in receivers]
    return [lambda: send_tensors(sender, weights(), 1), *(partial(one.receive, 1) for one in made)]


def _failure(member: Callable[[], object]) -> Exception | None:
    """A member's failure, which is kept while others still wait, with all that it refers to."""
    try:
        member()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    return None


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = SimpleNamespace(begin=lambda: None, abandon=lambda: None, finish=lambda: None)
    monkeypatch.setattr(receiver, "TensorwiseLoading", lambda *_: loading)


def _failures(members: Members) -> list[Exception | None]:
    began = time.monotonic()
    with ThreadPoolExecutor(len(members)) as pool:
        found = list(pool.map(_failure, members))
    assert time.monotonic() - began < 30, "nobody waits for the timeout of the groups"
    return found


def test_everybody_is_told_of_a_worker_that_cannot_load() -> None:
    members = _members(bad_receiver=True)
    sender, bad, other = _failures(members)
    assert str(bad) == "'no such parameter'"
    assert "receivers are gone" in str(sender)
    assert "stage 0 stopped sending" in str(other)
    assert [str(_failure(member)) for member in members[1:]] == [
        "the groups of this worker failed before and were not made anew"
    ] * RECEIVERS


def test_everybody_is_told_of_a_rank_that_cannot_send() -> None:
    members = _members(bad_sender=True)
    sender, *others = _failures(members)
    assert str(sender) == "cannot be gathered"
    assert all("stage 0 stopped sending" in str(other) for other in others)
    assert str(_failure(members[0])) == "the group of this rank failed before and was not made anew"
