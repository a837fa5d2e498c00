"""Refits by broadcast and by shards against the full tensors, and models that are loaded again."""

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
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import build_weight_map, measure_tensors, parse_model_shape
from megatron_grpo.models.hf_weights import BoundEntry, merge_slices
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, split_policy
from megatron_grpo.models.weight_map import index_tensors, iter_entries, pad_vocab
from megatron_grpo.platform.device import Platform, open_store
from megatron_grpo.weight_sync import engine_layers, shard_receiver, shard_sender
from megatron_grpo.weight_sync.boxes import list_full_boxes, to_slices
from megatron_grpo.weight_sync.engine_layers import ModelReload
from megatron_grpo.weight_sync.pieces import lay_out_pieces, read_ranges, split_messages
from megatron_grpo.weight_sync.refit_group import Rendezvous
from megatron_grpo.weight_sync.shard_receiver import TensorReceiver
from megatron_grpo.weight_sync.shard_sender import ShardSender, SourceLinks, pack_piece
from megatron_grpo.weight_sync.transfer_plan import plan_messages, write_plan
from tests.support.engine_table import table_boxes
from tests.support.refit_models import DENSE, SHAPES, full_tensor, made_up_worker

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
    shards, whole = split_policy(ParallelConfig(tensor=2), SHAPE), [list_full_boxes(TENSORS)]
    scheduled = plan_messages(SHAPE, shards, whole, RECEIVERS, dtypes, BUCKET_BYTES)
    write_plan(store, scheduled, SOURCES, RECEIVERS, dtypes, shared_memory=False)

    def make(*models: MadeUpModel) -> tuple[list[SourceLinks], list[Any]]:
        workers = [made_up_worker(model) for model in models]
        with ThreadPoolExecutor(SOURCES + RECEIVERS) as pool:
            device = torch.device("cpu")
            sources = [pool.submit(SourceLinks, rendezvous, rank, device, list(TENSORS)) for rank in range(SOURCES)]
            source = json.loads(json.dumps({"rendezvous": asdict(rendezvous), "tensors": TENSORS}))
            targets = [pool.submit(TensorReceiver, one, source, rank) for rank, one in enumerate(workers)]
        return [one.result() for one in sources], [one.result() for one in targets]

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
        found = list(pool.map(failure, calls))
    assert time.monotonic() - began < 30, "nobody waits for the timeout of the groups"
    return found


def test_every_worker_receives_all_tensors_whole(members: Any) -> None:
    models = MadeUpModel(), MadeUpModel()
    sources, receivers = members(*models)
    assert _failures([*(partial(_send, one) for one in sources), *(partial(one.receive, 1) for one in receivers)]) == [
        None
    ] * (SOURCES + RECEIVERS)
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
    *senders, bad, other = _failures(
        [*(partial(_send, one) for one in sources), *(partial(one.receive, 1) for one in receivers)]
    )
    assert str(bad) == "'no such parameter'"
    assert all(isinstance(sender, RuntimeError) for sender in senders)
    assert isinstance(other, RuntimeError)
    for one in receivers:
        with pytest.raises(RuntimeError, match="the links of this rank failed before and were not made anew"):
            one.receive(1)


def test_everybody_is_told_of_a_rank_that_cannot_send(members: Any) -> None:
    sources, receivers = members(MadeUpModel(), MadeUpModel())
    bad, other, *workers = _failures(
        [partial(_send, sources[0], 4), partial(_send, sources[1]), *(partial(one.receive, 1) for one in receivers)]
    )
    assert str(bad) == "cannot be merged"
    assert isinstance(other, RuntimeError)
    assert all(isinstance(worker, RuntimeError) for worker in workers)


class Doubling(QuantizeMethodBase):
    """vLLM's form of the layer, twice the plain weight; converted with a new kernel only."""

    def __init__(self) -> None:
        self.moe_kernel: object | None = None

    def create_weights(self, *_: Any) -> None: ...

    def apply(self, *_: Any) -> Any: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.moe_kernel is None:
            self.moe_kernel = object()
            layer.weight = nn.Parameter(2.0 * layer.weight, requires_grad=False)


class Experts(nn.Module):
    """A rank's only expert, of two that are offered to it."""

    def __init__(self) -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.zeros(1, 3), requires_grad=False)
        weight.weight_loader = self.load
        self.weight = weight
        self.quant_method = Doubling()

    @staticmethod
    def load(param: Tensor, loaded: Tensor, expert: int) -> bool:
        if expert == 0:
            param.data[0].copy_(loaded)
        return expert == 0


@pytest.fixture
def model() -> nn.Module:
    made = nn.Sequential(Experts(), Experts())
    record_metadata_for_reloading(made)
    for layer in made:
        layer.quant_method.process_weights_after_loading(layer)
    return made


def offer(layer: Any, value: float, expert: int) -> None:
    layer.weight.weight_loader(layer.weight, torch.full((3,), value), expert)


def test_the_experts_of_other_ranks_may_come_before_and_after_the_own_one(model: Any) -> None:
    reload, layer, memory = ModelReload(made_up_worker(model)), model[0], model[0].weight.data_ptr()
    for version in (1.0, 2.0):
        reload.begin()
        opened = layer.weight  # a loop over tensors holds on to what it found by name
        for value, expert in ((9.0, 1), (version, 0), (9.0, 1)):
            opened.weight_loader(opened, torch.full((3,), value), expert)
        offer(model[1], version, 0)
        reload.finish()
        assert layer.weight.tolist() == [[2.0 * version] * 3]
        assert layer.weight.data_ptr() == memory


def test_a_layer_of_which_nothing_comes_keeps_its_weights_and_its_kernel(model: Any) -> None:
    reload, kernel = ModelReload(made_up_worker(model)), model[1].quant_method.moe_kernel
    reload.begin()
    offer(model[0], 4.0, 0)
    reload.finish()
    assert model[0].weight.tolist() == [[8.0] * 3]
    assert model[1].weight.tolist() == [[0.0] * 3]
    assert model[1].quant_method.moe_kernel is kernel


def test_a_reload_that_is_abandoned_makes_the_next_one_possible(model: Any) -> None:
    reload = ModelReload(made_up_worker(model))
    reload.begin()
    offer(model[0], 9.0, 1)
    reload.abandon()
    assert model[0].weight.tolist() == [[0.0] * 3]
    assert model[0].quant_method.moe_kernel is not None
    reload.begin()
    offer(model[0], 3.0, 0)
    reload.finish()
    assert model[0].weight.tolist() == [[6.0] * 3]


def test_a_kernel_whose_tensors_graphs_have_captured_stays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = object()
    layer: Any = SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=kernel))
    platform = Platform("cuda", torch.device("cuda", 0), "nccl")
    monkeypatch.setattr(engine_layers, "detect_platform", lambda: platform)
    assert engine_layers.delete_kernel(layer) is None
    assert layer.quant_method.moe_kernel is kernel


@pytest.mark.parametrize(
    ("now", "found"),
    [(torch.zeros(2, 3), r"is \[2, 3\] in torch.float32"), (None, "is gone")],
    ids=["transposed", "gone"],
)
def test_weights_that_vllm_has_rewritten_are_not_written_in_place(now: Tensor | None, found: str) -> None:
    """A later release may rewrite weights of layers that this one leaves as they are."""
    norm: Any = nn.Module()
    norm.weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    whole = nn.ModuleDict({"norm": norm})
    record_metadata_for_reloading(whole)
    ModelReload(made_up_worker(whole))
    norm.weight = None if now is None else nn.Parameter(now, requires_grad=False)
    with pytest.raises(ValueError, match=rf"norm.weight was \[3, 2\] in torch.float32 and {found}"):
        ModelReload(made_up_worker(whole))


def bind_parameters(shape: ModelShape, shard: RankShard, change: float) -> list[BoundEntry]:
    """The rank's parameters, each inside of a larger buffer as Megatron-Core has them, with changed values."""
    bound = []
    for entry, layer, _ in iter_entries(build_weight_map(shape), shape, shard.layers):
        if not shard.keeps(entry, layer):
            continue
        split = shard.find_split(entry)
        for expert in range(*shard.experts) if entry.per_expert else [0]:
            slices = entry.list_slices(shape, layer, split.index, split.count, expert)
            parts = [full_tensor(part.name, part.shape)[part.region] + change for part in slices]
            rows = pad_vocab(shape, split.count) // split.count
            merged = merge_slices(entry, parts, shape, rows)
            buffer = torch.cat([torch.zeros(expert + 3), merged.flatten()])
            parameter = buffer[expert + 3 :].view(merged.shape)
            bound.append(BoundEntry(entry, layer, parameter, expert - shard.experts[0] if entry.per_expert else 0))
    return bound


@pytest.mark.parametrize("family", sorted(SHAPES))
@pytest.mark.parametrize("number", [0, 3])
def test_messages_hold_the_parts_of_full_tensors(family: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = parse_model_shape(SHAPES[family])
    layout = ParallelConfig(tensor=2, data=2, expert=2 if shape.experts is not None else 1)
    generation = GenerationParallelConfig(tensor=2)
    shards, names = split_policy(layout, shape), list(index_tensors(build_weight_map(shape), shape))
    dtypes = ["float32"] * len(build_weight_map(shape))
    pieces = plan_messages(shape, shards, table_boxes(generation, shape), 1, dtypes, 1 << 14)
    messages = split_messages(pieces[pieces["source"] == number])
    layouts = [lay_out_pieces(message, [torch.float32] * len(dtypes)) for message in messages]
    sent: list[Tensor] = []

    def send(fill: Callable[[int, Tensor], None], version: int) -> None:
        for message, (_, size) in enumerate(layouts):
            sent.append(torch.zeros(size, dtype=torch.uint8))
            fill(message, sent[-1])

    links: Any = SimpleNamespace(
        messages=messages,
        packed_pieces=[packed for packed, _ in layouts],
        sizes=[size for _, size in layouts],
        is_relayed=[False] * len(messages),
        send=send,
    )
    rank: Any = SimpleNamespace(shape=shape, gather_chunks=list)
    sender = ShardSender(rank, shards[number], links)
    for change in (0.0, 1.0):
        sent.clear()
        bound = bind_parameters(shape, shards[number], change)
        monkeypatch.setattr(shard_sender, "bind_entries", lambda chunks, of, bound=bound: bound)
        sender.send(0)
        for message, (packed, _), buffer in zip(messages, layouts, sent, strict=True):
            for piece, part in zip(message, packed, strict=True):
                name = names[piece["tensor"]]
                full = full_tensor(name, measure(name, shape)) + change
                torch.testing.assert_close(
                    part.view_values(buffer), full[to_slices(read_ranges(piece))], rtol=0, atol=0
                )


def measure(name: str, shape: ModelShape) -> tuple[int, ...]:
    return index_tensors(build_weight_map(shape), shape)[name].tensor.measure(shape.sizes)
