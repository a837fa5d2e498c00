"""The policy's half of a refit shard to shard: functions that run on every rank, each of which sends what it has."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Work

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.hf_weights import BoundEntry, bound_entries
from megatron_grpo.models.merge import split_parameter
from megatron_grpo.models.weight_map import WeightSlice
from megatron_grpo.platform.device import current_platform
from megatron_grpo.refit.buckets import SEAL_BYTES, seal
from megatron_grpo.refit.groups import Rendezvous
from megatron_grpo.refit.interface import Sent
from megatron_grpo.refit.reshard.links import Links, views
from megatron_grpo.refit.reshard.plan import box_of

if TYPE_CHECKING:
    from megatron_grpo.models.places import Place
    from megatron_grpo.policy.rank.policy_rank import PolicyRank


class ShardSender:
    """The sending end of a rank's links.

    Args:
        rank: the rank's model.
        place: what the rank has of it.
        links: connected.
    """

    def __init__(self, rank: PolicyRank, place: Place, links: Links) -> None:
        self._rank, self._place, self._links = rank, place, links
        self._numbers = {entry: number for number, entry in enumerate(weight_entries(rank.shape))}
        self._bound: dict[tuple[int, int, int], BoundEntry] = {}
        self._key: tuple[int, int, int] | None = None
        self._parts: list[tuple[WeightSlice, Tensor]] = []

    def send(self, version: int) -> Sent:
        """Send one version: a message is packed while the one before it is under way.

        Raises:
            RuntimeError: a receiver stopped receiving.
        """
        self._bind()
        with ExitStack() as on_failure:
            on_failure.callback(self._links.close)
            self._send(version)
            on_failure.pop_all()
        messages = self._links.messages
        sizes = [message.offsets()[-1] + SEAL_BYTES for message in messages]
        return Sent(sum(sizes), sum(len(message.pieces) for message in messages), len(messages))

    def _send(self, version: int) -> None:
        under_way: list[tuple[int, Work]] = []
        for number, message in enumerate(self._links.messages):
            if len(under_way) == 2:
                self._wait(*under_way.pop(0))
            buffer = self._links.buffer(number)
            for piece, view in zip(message.pieces, views(message, buffer, self._links.dtypes), strict=True):
                view.copy_(self._cut(piece))
            seal(buffer, version)
            under_way.append((number, self._links.begin(number)))
        for one in under_way:
            self._wait(*one)
        self._key, self._parts = None, []

    def _bind(self) -> None:
        """Find the parameters, which a model may replace between two refits."""
        first = self._place.experts[0]
        self._bound = {
            (self._numbers[bound.entry], bound.layer, bound.expert + first if bound.entry.per_expert else 0): bound
            for bound in bound_entries(self._rank.whole_chunks(), self._rank.shape)
        }

    def _cut(self, piece: Any) -> Tensor:
        """[rows, columns]: a piece of this rank's parameters."""
        key = int(piece["entry"]), int(piece["layer"]), int(piece["expert"])
        if key != self._key:  # what an adapter is merged into is merged once for all pieces
            bound = self._bound[key]
            part = self._place.expert_tensor if bound.entry.per_expert else self._place.tensor
            slices = bound.entry.slices(self._rank.shape, bound.layer, part.index, part.count, key[2])
            tensors = split_parameter(bound.entry, bound.weight(), slices, self._rank.shape)
            self._key, self._parts = key, list(zip(slices, tensors, strict=True))
        part_slice, tensor = self._parts[piece["tensor"]]
        box = box_of(part_slice)
        rows, columns = piece["rows"] - box.row, piece["columns"] - box.column
        matrix = tensor if tensor.dim() == 2 else tensor[:, None]
        return matrix[rows[0] : rows[1], columns[0] : columns[1]]

    def _wait(self, number: int, work: Work) -> None:
        try:
            work.wait()
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
