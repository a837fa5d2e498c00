"""Refit from shard to shard: `ShardSender` runs on a rank of the policy, `ReshardTransport` on the driver, which plans
the slices, and `ReshardReceiver` in an engine's worker."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import ray
import torch
from torch import Tensor
from torch.distributed import Store

from megatron_grpo.config.generation_schema import GenerationParallelConfig, RefitMode
from megatron_grpo.platform.device import current_platform
from megatron_grpo.weights.families import shape_of_folder, weight_entries
from megatron_grpo.weights.families.family import WeightSlice
from megatron_grpo.weights.hf_weights import BoundEntry, bound_entries, split_parameter
from megatron_grpo.weights.layouts import engine_shards, training_shards
from megatron_grpo.weights.refit.buckets import checksum_problem, write_checksum
from megatron_grpo.weights.refit.groups import Rendezvous, leave_on_failure
from megatron_grpo.weights.refit.links import BUFFERS, Links, Transfer, schedule, write_plan
from megatron_grpo.weights.refit.model_writer import ModelWriter
from megatron_grpo.weights.refit.plan import box_of, plan_pieces, wire_dtypes
from megatron_grpo.weights.refit.transport import GroupTransport, SentCounts

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank
    from megatron_grpo.weights.layouts import RankShard


class _Key(NamedTuple):
    """One parameter of the whole model."""

    entry: int
    layer: int
    expert: int


class _Cut(NamedTuple):
    """The position of a piece in this rank's parameters."""

    key: _Key
    tensor: int
    """Number among the tensors that the parameter is made of."""
    rows: slice
    columns: slice


class ShardSender:
    """The sending end of a rank's links.

    Args:
        rank: the rank's model.
        shard: what the rank holds of it.
        links: connected.
    """

    def __init__(self, rank: PolicyRank, shard: RankShard, links: Links) -> None:
        self._rank, self._shard, self._links = rank, shard, links
        self._entries = weight_entries(rank.shape)
        self._cuts = [[self._cut(piece) for piece in message.pieces] for message in links.messages]
        self._bound: dict[_Key, BoundEntry] = {}
        self._bound_tensors: list[Tensor] = []
        """Parameters and buffers of the model that `_bound` was made of."""
        self._key: _Key | None = None
        self._tensors: list[Tensor] = []

    def send(self, version: int) -> SentCounts:
        """Send one version: a message is packed while the previous one is being sent.

        Raises:
            RuntimeError: a receiver stopped receiving.
        """
        self._bind()
        with leave_on_failure(self._links.close):
            self._send(version)
        return SentCounts(sum(self._links.sizes), sum(map(len, self._cuts)), len(self._cuts))

    def _send(self, version: int) -> None:
        under_way: list[tuple[int, Transfer]] = []
        for number, cuts in enumerate(self._cuts):
            if len(under_way) == BUFFERS:
                self._wait(*under_way.pop(0))
            buffer = self._links.buffer(number)
            for cut, parcel in zip(cuts, self._links.packed_pieces[number], strict=True):
                parcel.pack(buffer, self._values(cut))
            write_checksum(buffer, version)
            under_way.append((number, self._links.begin(number)))
        for one in under_way:
            self._wait(*one)
        self._key, self._tensors = None, []

    def _bind(self) -> None:
        """Find the parameters again if the model has replaced one since the last refit."""
        chunks = self._rank.whole_chunks()
        tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        if len(tensors) == len(self._bound_tensors) and all(map(operator.is_, tensors, self._bound_tensors)):
            return
        self._bound_tensors = tensors
        numbers = {entry: number for number, entry in enumerate(self._entries)}
        first = self._shard.experts[0]
        self._bound = {
            _Key(numbers[bound.entry], bound.layer, bound.expert + first if bound.entry.per_expert else 0): bound
            for bound in bound_entries(chunks, self._rank.shape)
        }

    def _cut(self, piece: Any) -> _Cut:
        key, tensor = _Key(int(piece["entry"]), int(piece["layer"]), int(piece["expert"])), int(piece["tensor"])
        box = box_of(self._slices(key)[tensor])
        rows, columns = (piece["rows"] - box.row).tolist(), (piece["columns"] - box.column).tolist()
        return _Cut(key, tensor, slice(*rows), slice(*columns))

    def _values(self, cut: _Cut) -> Tensor:
        """[rows, columns]: a piece of this rank's parameters."""
        if cut.key != self._key:  # an adapter is merged once for all pieces of its matrix
            bound = self._bound[cut.key]
            tensors = split_parameter(bound.entry, bound.weight(), self._slices(cut.key), self._rank.shape)
            self._key, self._tensors = cut.key, [t if t.dim() == 2 else t[:, None] for t in tensors]
        return self._tensors[cut.tensor][cut.rows, cut.columns]

    def _slices(self, key: _Key) -> list[WeightSlice]:
        """The slices of the Hugging Face tensors of a parameter that this rank holds."""
        entry = self._entries[key.entry]
        part = self._shard.expert_tensor if entry.per_expert else self._shard.tensor
        return entry.slices(self._rank.shape, key.layer, part.index, part.count, key.expert)

    def _wait(self, number: int, transfer: Transfer) -> None:
        try:
            transfer.wait()
        except RuntimeError as error:
            messages = self._links.messages
            first = messages[number].begins_with(weight_entries(self._rank.shape))
            which = f"message {number} of {len(messages)}, which begins with {first},"
            raise RuntimeError(f"{which} did not reach {self._links.peer(messages[number])}: {error}") from error


_sender: ShardSender | None = None
"""The sender of this process, which is one rank of the policy."""


def connect_shards(rank: PolicyRank, rendezvous: Rendezvous, shards: list[RankShard]) -> None:
    """Join the group of all ranks and test every link of this one.

    Args:
        rank: the rank's model.
        rendezvous: address and size of the group.
        shards: shards of all ranks of the policy in the plan.
    """
    global _sender
    _sender = None
    number = torch.distributed.get_rank()
    _require_layout(rank, shards[number])
    _sender = ShardSender(rank, shards[number], Links(rendezvous, "source", number, current_platform().device))


@torch.no_grad()
def send_shards(rank: PolicyRank, version: int) -> SentCounts:
    """Send this rank's part of the plan."""
    assert _sender is not None, "connect_shards() comes first"
    return _sender.send(version)


def _require_layout(rank: PolicyRank, shard: RankShard) -> None:
    """Check that the layout of the plan, made from the configuration alone, is the one Megatron-Core has made."""
    from megatron.core import parallel_state

    layers = tuple(layer.layer_number - 1 for chunk in rank.chunks for layer in chunk.decoder.layers)
    tensor = parallel_state.get_tensor_model_parallel_rank()
    assert (layers, tensor) == (shard.layers, shard.tensor.index), f"planned for {shard}, has {layers}, {tensor}"


class ReshardTransport(GroupTransport):
    """Every engine rank receives the slices that it keeps, from ranks of the policy that hold them."""

    mode: ClassVar[RefitMode] = "reshard"

    def _connect_senders(self, store: Store, rendezvous: Rendezvous) -> list[ray.ObjectRef]:
        settings, layout = self._policy.settings, self._generation.parallel
        shards = training_shards(settings.config.parallel, settings.shape)
        engine = engine_shards(layout, settings.shape)
        dtypes = wire_dtypes(settings.shape, settings.config.precision, self._config.fp8_blocks)
        limit, same_devices = self._bucket_bytes // 2, self._generation.colocated
        engines = rendezvous.receivers // len(engine)
        pieces = plan_pieces(settings.shape, shards, engine, engines, dtypes, limit, same_devices=same_devices)
        scheduled = schedule(pieces, self._bucket_bytes)
        write_plan(store, scheduled, len(shards), rendezvous.receivers, dtypes, self._config.shared_memory)
        return self._policy.submit(connect_shards, rendezvous, shards)

    def _send(self, version: int) -> list[ray.ObjectRef]:
        return self._policy.submit(send_shards, version)


class ReshardReceiver:
    """The receiving end of a worker's links.

    Args:
        model: vLLM's model.
        vllm_config: vLLM's settings of the engine.
        device: where the model is.
        rendezvous: address and size of the group.
        number: the worker's, counted over all engines.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, device: torch.device, rendezvous: Rendezvous, number: int
    ) -> None:
        parallel = vllm_config.parallel_config
        shape = shape_of_folder(vllm_config.model_config.model)
        layout = GenerationParallelConfig(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            expert=parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
        )
        self._entries = weight_entries(shape)
        self._links = Links(rendezvous, "target", number, device)
        shard = engine_shards(layout, shape)[parallel.rank]
        messages = [message.pieces for message in self._links.messages]
        scaled = {entry for entry, dtype in enumerate(self._links.dtypes) if dtype == torch.float8_e4m3fn}
        self._writer = ModelWriter(model, vllm_config.model_config.dtype, shape, shard, messages, scaled)

    def begin(self) -> None:
        """Forget what was counted of an earlier version."""
        self._writer.begin()

    def receive(self, version: int) -> None:
        """Receive one version: a message is written to the model while the next one arrives.

        Raises:
            ValueError: a checksum was broken. Raised after the last message, so that nobody else is kept waiting;
            nothing
                that comes after it is written.
            RuntimeError: a rank of the policy stopped sending, or the links failed before.
        """
        with leave_on_failure(self._links.close):
            self._receive(version)

    def _receive(self, version: int) -> None:
        links, messages = self._links, self._links.messages
        under_way = {number: links.begin(number) for number in range(min(BUFFERS, len(messages)))}
        broken: list[str] = []
        for number, message in enumerate(messages):
            try:
                under_way.pop(number).wait()
            except RuntimeError as error:
                which = f"message {number} of {len(messages)}, which begins with {message.begins_with(self._entries)},"
                raise RuntimeError(f"{which} did not come from {links.peer(message)}: {error}") from error
            problem = checksum_problem(links.buffer(number), version)
            if problem is not None:
                first = message.begins_with(self._entries)
                broken.append(f"message {number} from {links.peer(message)}: {problem}; it begins with {first}")
            if not broken:
                self._write(number, links.buffer(number))
            links.emptied(number)
            if number + BUFFERS < len(messages):  # into the buffer that is free now
                under_way[number + BUFFERS] = links.begin(number + BUFFERS)
        if broken:
            raise ValueError("; ".join(broken))

    def _write(self, number: int, message: Tensor) -> None:
        """Write the pieces of a message, [bytes], uint8, to the model."""
        for position, parcel in enumerate(self._links.packed_pieces[number]):
            scales = parcel.scales(message) if parcel.scaled else None
            self._writer.write(number, position, parcel.numbers(message), scales)

    def finish(self) -> None:
        """Let vLLM recompute what it derives from weights."""
        self._writer.finish()

    def abandon(self) -> None:
        """Restore the previous weights of incomplete layers; the next version overwrites the others."""
        self._writer.abandon()
