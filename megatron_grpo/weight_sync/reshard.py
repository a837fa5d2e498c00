"""Refit from shard to shard: `ShardSender` runs on a rank of the policy, `ReshardTransport` on the driver, which plans
the slices, and `ReshardReceiver` in an engine's worker."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Store

from megatron_grpo.cluster.ray_cluster import find_node_address
from megatron_grpo.config.generation_schema import GenerationParallelConfig, RefitMode
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.families import build_weight_map, read_model_shape
from megatron_grpo.models.hf_weights import BoundEntry, bind_entries, split_parameter
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, shard_engine, shard_policy
from megatron_grpo.models.weight_map import WeightSlice
from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync.groups import Rendezvous
from megatron_grpo.weight_sync.links import Links, schedule, write_plan
from megatron_grpo.weight_sync.model_writer import ModelWriter
from megatron_grpo.weight_sync.transfer_plan import box_of, plan_pieces, wire_dtypes
from megatron_grpo.weight_sync.transport import TransferReport, WeightTransport

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


_Key = tuple[int, int, int]
"""One parameter of the whole model: (row of the weight map, layer, expert)."""


_Cut = tuple[_Key, int, slice, slice]
"""The position of a piece in this rank's parameters: (parameter, number of one of its Hugging Face tensors, rows,
columns)."""


class ShardSender:
    """The sending end of a rank's connected links; `shard` says what the rank holds of the model."""

    def __init__(self, rank: PolicyRank, shard: RankShard, links: Links) -> None:
        self._rank, self._shard, self._links = rank, shard, links
        self._entries = build_weight_map(rank.shape)
        self._cuts = [[self._cut(piece) for piece in pieces] for pieces in links.messages]
        self._bound: dict[_Key, BoundEntry] = {}
        """The model's parameters at the start of the current send."""
        self._key: _Key | None = None
        self._tensors: list[Tensor] = []

    def send(self, version: int) -> tuple[int, int, int]:
        """Send one version; returns the numbers of bytes (with padding and checksums), of pieces and of messages.

        Raises:
            RuntimeError: a receiver stopped receiving.
        """
        numbers = {entry: number for number, entry in enumerate(self._entries)}
        first = self._shard.experts[0]
        self._bound = {
            (numbers[bound.entry], bound.layer, bound.expert + first if bound.entry.per_expert else 0): bound
            for bound in bind_entries(self._rank.gather_chunks(), self._rank.shape)
        }
        self._links.send(self._fill, version)
        self._key, self._tensors = None, []
        return sum(self._links.sizes), sum(map(len, self._cuts)), len(self._cuts)

    def _fill(self, number: int, message: Tensor) -> None:
        for cut, parcel in zip(self._cuts[number], self._links.packed_pieces[number], strict=True):
            parcel.pack(message, self._values(cut))

    def _cut(self, piece: Any) -> _Cut:
        key, tensor = (int(piece["entry"]), int(piece["layer"]), int(piece["expert"])), int(piece["tensor"])
        box = box_of(self._slices(key)[tensor])
        rows, columns = (piece["rows"] - box.row).tolist(), (piece["columns"] - box.column).tolist()
        return key, tensor, slice(*rows), slice(*columns)

    def _values(self, cut: _Cut) -> Tensor:
        """[rows, columns]: a piece of this rank's parameters."""
        key, number, rows, columns = cut
        if key != self._key:  # an adapter is merged once for all pieces of its matrix
            bound = self._bound[key]
            tensors = split_parameter(bound.entry, bound.weight(), self._slices(key), self._rank.shape)
            self._key, self._tensors = key, [t if t.dim() == 2 else t[:, None] for t in tensors]
        return self._tensors[number][rows, columns]

    def _slices(self, key: _Key) -> list[WeightSlice]:
        """The slices of the Hugging Face tensors of a parameter that this rank holds."""
        number, layer, expert = key
        part = self._shard.part(self._entries[number])
        return self._entries[number].slices(self._rank.shape, layer, part.index, part.count, expert)


_sender: ShardSender | None = None
"""The sender of this process, which is one rank of the policy."""


def connect_shards(rank: PolicyRank, rendezvous: Rendezvous) -> None:
    """Join the group of all ranks and test this rank's links."""
    global _sender
    _sender = None
    from megatron.core import parallel_state

    number = torch.distributed.get_rank()
    # The plan's layout follows from the configuration alone, and must equal Megatron-Core's.
    layers = tuple(layer.layer_number - 1 for chunk in rank.chunks for layer in chunk.decoder.layers)
    tensor = parallel_state.get_tensor_model_parallel_rank()
    planned = shard_policy(rank.config.parallel, rank.shape)[number]
    assert (layers, tensor) == (planned.layers, planned.tensor.index), f"planned for {planned}, has {layers}, {tensor}"
    links = Links(rendezvous, "source", number, rank.platform.device, build_weight_map(rank.shape))
    _sender = ShardSender(rank, planned, links)


@torch.no_grad()
def send_shards(rank: PolicyRank, version: int) -> tuple[int, int, int]:
    """Send this rank's part of the plan (`ShardSender.send`)."""
    assert _sender is not None, "connect_shards() comes first"
    return _sender.send(version)


class ReshardTransport(WeightTransport):
    """Every engine rank receives the slices that it keeps, from ranks of the policy that hold them."""

    mode: ClassVar[RefitMode] = "reshard"

    def _engine_shards(self) -> list[RankShard]:
        """The shard that each rank of an engine receives."""
        return shard_engine(self._generation.config.parallel, self._policy.settings.shape)

    def _connect(self, engines: tuple[int, ...]) -> None:
        """Connect the policy and these engines, and no others."""
        ranks = self._generation.config.parallel.ranks_per_engine
        receivers = ranks * len(engines)
        self._store = open_store(find_node_address(), self._timeout_s)
        rendezvous = Rendezvous(
            host=self._store.host,
            port=self._store.port,
            receivers=receivers,
            timeout_s=self._timeout_s,
            same_gpus=self._generation.config.is_colocated,
        )
        self._write_plan(self._store, receivers)
        sends = self._policy.submit(connect_shards, rendezvous)
        receives: dict[int, Any] = {}
        for place, engine in enumerate(engines):
            receives |= self._on_engines([engine], Engine.connect_weights, self.mode, asdict(rendezvous), place * ranks)
        deadline = time.monotonic() + self._timeout_s
        self._complete(sends, receives, deadline, "connecting the refit")
        self._linked = engines

    def _write_plan(self, store: Store, receivers: int) -> None:
        """Write the messages of all ranks into the store."""
        settings, config = self._policy.settings, self._config
        shards = shard_policy(settings.config.parallel, settings.shape)
        engine = self._engine_shards()
        dtypes = wire_dtypes(settings.shape, settings.config.precision, config.fp8_blocks)
        limit, same_devices = self._bucket_bytes // 2, self._generation.config.is_colocated
        engines = receivers // len(engine)
        pieces = plan_pieces(settings.shape, shards, engine, engines, dtypes, limit, same_devices=same_devices)
        scheduled = schedule(pieces, self._bucket_bytes)
        write_plan(store, scheduled, len(shards), receivers, dtypes, config.shared_memory)

    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        deadline = time.monotonic() + self._timeout_s
        receives = self._on_engines(engines, Engine.receive_weights, version)
        sends = self._policy.submit(send_shards, version)
        self._begin_checks()
        counts = self._complete(sends, receives, deadline, f"refit of version {version}")[: len(sends)]
        self._commit(version, engines, deadline)
        nbytes, tensors, buckets = map(sum, zip(*counts, strict=True))
        return TransferReport(version=version, bytes_sent=nbytes, tensors=tensors, buckets=buckets)


def shard_of_worker(worker: Any, shape: ModelShape) -> RankShard:
    """The part of a model of these sizes that a worker of vLLM holds."""
    parallel = worker.vllm_config.parallel_config
    layout = GenerationParallelConfig(
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        expert=parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
    )
    return shard_engine(layout, shape)[parallel.rank]


class ReshardReceiver:
    """The receiving end of a worker's links.

    Args:
        worker: vLLM's worker, with a loaded model.
        rendezvous: address and size of the group.
        number: number of the worker, counted over all engines.
    """

    def __init__(self, worker: Any, rendezvous: Rendezvous, number: int) -> None:
        self._shape = read_model_shape(worker.vllm_config.model_config.model)
        self._entries = build_weight_map(self._shape)
        self._links = Links(rendezvous, "target", number, worker.device, self._entries)
        self._model = self._loaded_model(worker)
        self.abandon = self._model.abandon

    def receive(self, version: int) -> None:
        """Receive one version: a message is written to the model while the next one arrives.

        Raises:
            ValueError: a checksum was broken; nothing that comes after it is written.
            RuntimeError: a rank of the policy stopped sending, or the links failed before.
        """
        self._model.begin()
        self._links.receive(self._write, version)
        self._model.finish()

    def _loaded_model(self, worker: Any) -> Any:
        """The writer of the worker's model, which `receive` and `_write` use."""
        shard = shard_of_worker(worker, self._shape)
        scaled = {entry for entry, dtype in enumerate(self._links.dtypes) if dtype == torch.float8_e4m3fn}
        model, dtype = worker.model_runner.get_model(), worker.vllm_config.model_config.dtype
        return ModelWriter(model, dtype, self._shape, shard, self._links.messages, scaled)

    def _write(self, number: int, message: Tensor) -> None:
        """Write the pieces of a message, [bytes], uint8, to the model."""
        for position, parcel in enumerate(self._links.packed_pieces[number]):
            self._model.write(number, position, parcel.numbers(message), parcel.scales(message))
