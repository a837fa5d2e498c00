"""Broadcasts over real groups, each member in a thread of its own: whole tensors come, and a member that fails keeps
nobody waiting."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import build_weight_map, measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync import shard_receiver
from megatron_grpo.weight_sync.boxes import list_full_boxes, to_slices
from megatron_grpo.weight_sync.pieces import read_ranges
from megatron_grpo.weight_sync.refit_group import Rendezvous
from megatron_grpo.weight_sync.shard_receiver import TensorReceiver
from megatron_grpo.weight_sync.shard_sender import SourceLinks, pack_piece
from megatron_grpo.weight_sync.transfer_plan import plan_messages, write_plan
from tests.support.refit_models import DENSE, full_tensor, made_up_worker

MODEL = {**DENSE, "hidden_size": 32}  # as vLLM computes the size of a head in a folder of Qwen2
SHAPE = parse_model_shape(MODEL)
ENTRIES = build_weight_map(SHAPE)
TENSORS = measure_tensors(SHAPE)
SOURCES, RECEIVERS = 2, 2
BUCKET_BYTES = 1024
"""So small that most tensors come in several messages."""


class MadeUpModel:
    """Loads whatever comes; a bad one fails at the second call, which vLLM's loader may do."""

    def __init__(self, bad: bool = False) -> None:
        self._bad = bad
        self.calls = 0
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
        self.calls += 1
        if self._bad and self.calls == 2:
            raise KeyError("no such parameter")
        self.loaded |= dict(tensors)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(worker: Any, _: Any) -> Any:
        around = dict.fromkeys(("begin", "abandon", "finish"), lambda: None)
        return SimpleNamespace(load=worker.model_runner.get_model().load_weights, **around)

    monkeypatch.setattr(shard_receiver, "make_loader", loading)


@pytest.fixture
def members() -> Iterator[Callable[..., tuple[list[SourceLinks], list[Any]]]]:
    """Makes the links of a policy with TP2, and two receivers with these models."""
    store = open_store("127.0.0.1", 60.0)
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, receivers=RECEIVERS, timeout_s=60.0)
    dtypes = ["float32"] * len(ENTRIES)
    shards, boxes = split_policy(ParallelConfig(tensor=2), SHAPE), [list_full_boxes(TENSORS)]
    scheduled = plan_messages(SHAPE, shards, boxes, RECEIVERS, dtypes, BUCKET_BYTES)
    write_plan(store, scheduled, SOURCES, RECEIVERS, dtypes, shared_memory=False)

    def make(*models: MadeUpModel) -> tuple[list[SourceLinks], list[Any]]:
        workers = [made_up_worker(model) for model in models]
        with ThreadPoolExecutor(SOURCES + RECEIVERS) as pool:
            device = torch.device("cpu")
            sources = [pool.submit(SourceLinks, rendezvous, rank, device, list(TENSORS)) for rank in range(SOURCES)]
            source = json.loads(json.dumps({"rendezvous": asdict(rendezvous), "tensors": TENSORS}))
            targets = [pool.submit(TensorReceiver, worker, source, rank) for rank, worker in enumerate(workers)]
        return [worker.result() for worker in sources], [worker.result() for worker in targets]

    yield make
    del store  # it lives until the members are connected


def _send(links: SourceLinks, bad_message: int | None = None) -> None:
    def fill(number: int, message: Tensor) -> None:
        if number == bad_message:
            raise RuntimeError("cannot be merged")
        for piece, parcel in zip(links.messages[number], links.packed_pieces[number], strict=True):
            tensor = full_tensor(*list(TENSORS.items())[piece["tensor"]])
            pack_piece(parcel, message, tensor[to_slices(read_ranges(piece))])

    links.send(fill, 1)


def _failures(calls: list[Callable[[], object]]) -> list[Exception | None]:
    """Failures of calls that run at the same time; kept while others still wait, with all that they refer to."""

    def failure(call: Callable[[], object]) -> Exception | None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is
            return error
        return None

    began = time.monotonic()
    with ThreadPoolExecutor(len(calls)) as pool:
        failures = list(pool.map(failure, calls))
    assert time.monotonic() - began < 30, "nobody waits for the timeout of the groups"
    return failures


def test_every_worker_receives_all_tensors_whole(members: Any) -> None:
    models = MadeUpModel(), MadeUpModel()
    sources, receivers = members(*models)
    assert _failures(
        [*(partial(_send, receiver) for receiver in sources), *(partial(receiver.receive, 1) for receiver in receivers)]
    ) == [None] * (SOURCES + RECEIVERS)
    for model in models:
        expected = {
            tensor.name.format(layer=layer): tensor.measure(SHAPE.sizes)
            for entry in ENTRIES
            if not entry.copy
            for tensor in entry.hf
            for layer in range(SHAPE.layers)
        }
        assert model.loaded.keys() == expected.keys()
        assert all(torch.equal(model.loaded[name], full_tensor(name, shape)) for name, shape in expected.items())


def test_everybody_is_told_of_a_worker_that_cannot_load(members: Any) -> None:
    sources, receivers = members(MadeUpModel(bad=True), MadeUpModel())
    *senders, bad, other_failure = _failures(
        [*(partial(_send, receiver) for receiver in sources), *(partial(receiver.receive, 1) for receiver in receivers)]
    )
    assert str(bad) == "'no such parameter'"
    assert all(isinstance(sender, RuntimeError) for sender in senders)
    assert isinstance(other_failure, RuntimeError)
    for receiver in receivers:
        with pytest.raises(RuntimeError, match="the links of this rank failed before and were not made anew"):
            receiver.receive(1)


def test_everybody_is_told_of_a_rank_that_cannot_send(members: Any) -> None:
    sources, receivers = members(MadeUpModel(), MadeUpModel())
    bad, other_failure, *workers = _failures(
        [
            partial(_send, sources[0], 4),
            partial(_send, sources[1]),
            *(partial(receiver.receive, 1) for receiver in receivers),
        ]
    )
    assert str(bad) == "cannot be merged"
    assert isinstance(other_failure, RuntimeError)
    assert all(isinstance(worker, RuntimeError) for worker in workers)
