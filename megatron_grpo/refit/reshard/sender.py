"""The policy's half of a refit shard to shard: functions that run on every rank, each of which sends what it has."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.hf_weights import BoundEntry, bound_entries
from megatron_grpo.models.merge import split_parameter
from megatron_grpo.models.weight_map import WeightSlice
from megatron_grpo.platform.device import current_platform
from megatron_grpo.refit.buckets import seal
from megatron_grpo.refit.groups import Rendezvous, left_on_failure
from megatron_grpo.refit.interface import Sent
from megatron_grpo.refit.reshard.links import BUFFERS, Links, Transfer
from megatron_grpo.refit.reshard.plan import box_of

if TYPE_CHECKING:
    from megatron_grpo.models.places import Place
    from megatron_grpo.policy.rank.policy_rank import PolicyRank


class _Key(NamedTuple):
    """One parameter of the whole model."""

    entry: int
    layer: int
    expert: int


class _Cut(NamedTuple):
    """Where a piece is in this rank's parameters."""

    key: _Key
    tensor: int
    """Number among the tensors that the parameter is made of."""
    rows: slice
    columns: slice


class ShardSender:
    """The sending end of a rank's links.

    Args:
        rank: the rank's model.
        place: what the rank has of it.
        links: connected.
    """

    def __init__(self, rank: PolicyRank, place: Place, links: Links) -> None:
        self._rank, self._place, self._links = rank, place, links
        self._entries = weight_entries(rank.shape)
        self._cuts = [[self._cut(piece) for piece in message.pieces] for message in links.messages]
        self._bound: dict[_Key, BoundEntry] = {}
        self._bound_tensors: list[Tensor] = []
        """Parameters and buffers of the model that `_bound` was made of."""
        self._key: _Key | None = None
        self._tensors: list[Tensor] = []

    def send(self, version: int) -> Sent:
        """Send one version: a message is packed while the one before it is under way.

        Raises:
            RuntimeError: a receiver stopped receiving.
        """
        self._bind()
        with left_on_failure(self._links.close):
            self._send(version)
        return Sent(sum(self._links.sizes), sum(map(len, self._cuts)), len(self._cuts))

    def _send(self, version: int) -> None:
        under_way: list[tuple[int, Transfer]] = []
        for number, cuts in enumerate(self._cuts):
            if len(under_way) == BUFFERS:
                self._wait(*under_way.pop(0))
            buffer = self._links.buffer(number)
            for cut, parcel in zip(cuts, self._links.parcels[number], strict=True):
                parcel.pack(buffer, self._values(cut))
            seal(buffer, version)
            under_way.append((number, self._links.begin(number)))
        for one in under_way:
            self._wait(*one)
        self._key, self._tensors = None, []

    def _bind(self) -> None:
        """Find the parameters; anew when the model has replaced one since the last refit."""
        chunks = self._rank.whole_chunks()
        tensors = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        if len(tensors) == len(self._bound_tensors) and all(map(operator.is_, tensors, self._bound_tensors)):
            return
        self._bound_tensors = tensors
        numbers = {entry: number for number, entry in enumerate(self._entries)}
        first = self._place.experts[0]
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
        if cut.key != self._key:  # what an adapter is merged into is merged once for all pieces
            bound = self._bound[cut.key]
            tensors = split_parameter(bound.entry, bound.weight(), self._slices(cut.key), self._rank.shape)
            self._key, self._tensors = cut.key, [t if t.dim() == 2 else t[:, None] for t in tensors]
        return self._tensors[cut.tensor][cut.rows, cut.columns]

    def _slices(self, key: _Key) -> list[WeightSlice]:
        """What this rank holds of the tensors that a parameter is made of."""
        entry = self._entries[key.entry]
        part = self._place.expert_tensor if entry.per_expert else self._place.tensor
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
"""This process's end: a process is one rank of the policy."""


def connect_shards(rank: PolicyRank, rendezvous: Rendezvous, places: list[Place]) -> None:
    """Join the group of all ranks and try every link of this one.

    Args:
        rank: the rank's model.
        rendezvous: where to meet.
        places: of all ranks of the policy, as the plan has them.
    """
    global _sender
    _sender = None
    number = torch.distributed.get_rank()
    _require_place(rank, places[number])
    _sender = ShardSender(rank, places[number], Links(rendezvous, "source", number, current_platform().device))


@torch.no_grad()
def send_shards(rank: PolicyRank, version: int) -> Sent:
    """Send what the plan wants of this rank's weights."""
    assert _sender is not None, "connect_shards() comes first"
    return _sender.send(version)


def _require_place(rank: PolicyRank, place: Place) -> None:
    """The plan is made from the configuration alone; it must be what Megatron-Core has made of that."""
    from megatron.core import parallel_state

    layers = tuple(layer.layer_number - 1 for chunk in rank.chunks for layer in chunk.decoder.layers)
    tensor = parallel_state.get_tensor_model_parallel_rank()
    assert (layers, tensor) == (place.layers, place.tensor.index), f"planned for {place}, has {layers}, {tensor}"
