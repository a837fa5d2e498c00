"""Runs on a rank of the policy: sends its shard to the engines that keep parts of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_grpo.models.families import build_weight_map, measure_tensors
from megatron_grpo.models.hf_weights import BoundEntry, bind_entries, split_parameter
from megatron_grpo.models.megatron_names import list_layers
from megatron_grpo.models.weight_layouts import RankShard, split_policy
from megatron_grpo.models.weight_map import WeightSlice, index_tensors
from megatron_grpo.weight_sync.boxes import Range, to_slices
from megatron_grpo.weight_sync.links import BUFFERS, Links
from megatron_grpo.weight_sync.pieces import NO_RELAY, PieceLayout, find_ranges, read_ranges, write_checksum
from megatron_grpo.weight_sync.refit_group import Rendezvous, Transfer, TransferGroup, join_group
from megatron_grpo.weight_sync.shared_memory import SharedMemory
from megatron_grpo_kernels.fp8_blocks import quantise

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


class SourceLinks(Links):
    """The links of a policy rank, which sends."""

    side, peer_side = "source", "target"

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device, names: Sequence[str]) -> None:
        super().__init__(rendezvous, rank, device, names)
        self._answers = torch.arange(BUFFERS)  # notices that come back when a buffer in shared memory has been read
        self._offered: SharedMemory | None = None if self._memory is None else self._memory(self._buffer_bytes)
        if self._offered is None:
            self._buffers = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)
        else:
            self._buffers = self._offered.tensor
        self._relays: TransferGroup | None = None  # of all ranks of the policy
        self.is_relayed = [int(pieces[0]["relay"]) == rank for pieces in self.messages]  # filled by another rank
        self._connect(rendezvous)
        if self._has_relays:
            with self._fail_together():
                self._relays = self._watch.call(join_group, rendezvous, rank, self._sources, device, "relays")

    def send(self, fill: Callable[[int, Tensor], None], version: int) -> None:
        """Send one version: `fill` writes a payload while the previous one is sent.

        Raises:
            RuntimeError: a receiver stopped receiving, or the links failed before.
        """
        pending: dict[int, list[Transfer]] = {}
        with self._fail_together():
            for number in range(len(self.messages)):
                if number >= BUFFERS:
                    self._finish(number - BUFFERS, pending)
                buffer = self.view_buffer(number)
                if self.is_relayed[number]:
                    self._wait(self._start_relay(number, sends=False))
                else:
                    fill(number, buffer)
                    write_checksum(buffer, version)
                pending[number] = self.begin(number)
            for number in list(pending):
                self._finish(number, pending)

    def begin(self, number: int) -> list[Transfer]:
        """Start sending a message, or the notice that it can be read."""
        peer = self._peers[number]
        if self._is_far(number):
            return [self._start_relay(number, sends=True)]
        if self._memory is None or peer not in self._shared:
            return [self._start(peer, self.view_buffer(number), sends=True)]
        self._memory.synchronize()  # the message has been written
        notice, answer = self._notices[number % BUFFERS], self._answers[number % BUFFERS]
        return [self._start(peer, notice, sends=True), self._start(peer, answer, sends=False)]

    def close(self) -> None:
        """Leave the groups, which ends all transfers of this process."""
        super().close()
        relays, self._relays = self._relays, None
        if relays is not None:
            relays.abort()

    def _is_far(self, number: int) -> bool:
        return int(self.messages[number][0]["relay"]) not in (NO_RELAY, self._rank)

    def _start_relay(self, number: int, *, sends: bool) -> Transfer:
        if self._relays is None:
            raise RuntimeError("the links of this rank failed before and were not made anew")
        first = self.messages[number][0]
        start, peer = (self._relays.send, "relay") if sends else (self._relays.recv, "source")
        return start([self.view_buffer(number)], int(first[peer]), 0)

    def _find_peer(self, piece: Any) -> int:
        return int(piece["target"])

    def _list_linked_peers(self) -> list[int]:
        numbers = (number for number in range(len(self.messages)) if not self._is_far(number))
        return list(dict.fromkeys(self._peers[number] for number in numbers))

    def _open_link(self, peer: int, notice: Tensor) -> Tensor | None:
        # The target answers the notice only where the source offers memory, because messages there are answered too.
        # Elsewhere an answer would cost: NCCL keeps buffers for each direction that was ever used.
        address = None if self._offered is None else self._offered.export_address()
        self._store.set(f"memory/{self._rank}/{peer}", json.dumps(address))
        self._move_first(peer, notice, sends=True)
        if self._offered is None:
            return None
        self._move_first(peer, notice, sends=False)
        return self._offered.tensor if notice[2] else None


def pack_piece(packed: PieceLayout, message: Tensor, values: Tensor) -> None:
    """Write values to a piece's message; matrices in FP8 are rounded block by block."""
    scales = packed.view_scales(message)
    if scales is not None:
        values, block_scales = quantise(values)
        scales.copy_(block_scales)
    packed.view_values(message).copy_(values)


# Key of a parameter of the full model: (row of the weight map, layer, expert).
_Key = tuple[int, int, int]
# Position of a piece in this rank's parameters: (parameter, index of one of its slices, indices there).
_Position = tuple[_Key, int, tuple[slice, ...]]
# Layout of a parameter: (row of the weight map, sizes, strides); of a slice in it: (sizes, strides, first element).
_Form = tuple[int, tuple[int, ...], tuple[int, ...]]
_View = tuple[tuple[int, ...], tuple[int, ...], int]


class ShardSender:
    """The sending end of a policy rank's links."""

    def __init__(self, rank: PolicyRank, shard: RankShard, links: SourceLinks) -> None:
        self._rank, self._shard, self.links = rank, shard, links
        self._entries = build_weight_map(rank.shape)
        self._tensors = list(index_tensors(self._entries, rank.shape).values())
        self._positions = [
            [] if is_relayed else [self._locate(piece) for piece in pieces]
            for pieces, is_relayed in zip(links.messages, links.is_relayed, strict=True)
        ]
        self._bound: dict[_Key, BoundEntry] = {}  # the model's parameters at the start of the current send
        self._split_key: _Key | None = None  # the parameter that was split last, into `_split_tensors`
        self._split_tensors: list[Tensor] = []
        self._views: dict[_Form, list[_View]] = {}

    def send(self, version: int) -> tuple[int, int, int]:
        """Send a version; return its bytes (with checksums), pieces and messages."""
        indices = {entry: index for index, entry in enumerate(self._entries)}
        first = self._shard.experts[0]
        self._bound = {
            (indices[bound.entry], bound.layer, bound.expert + first if bound.entry.per_expert else 0): bound
            for bound in bind_entries(self._rank.gather_chunks(), self._rank.shape)
        }
        self.links.send(self._fill, version)
        self._split_key, self._split_tensors = None, []
        filled = [number for number, is_relayed in enumerate(self.links.is_relayed) if not is_relayed]
        return sum(self.links.sizes[number] for number in filled), sum(map(len, self._positions)), len(filled)

    def _fill(self, number: int, message: Tensor) -> None:
        for position, packed in zip(self._positions[number], self.links.packed_pieces[number], strict=True):
            key, section, indices = position
            if key != self._split_key:  # an adapter is merged once for all pieces of its matrix
                self._split_key, self._split_tensors = key, self._split(key)
            pack_piece(packed, message, self._split_tensors[section][indices])

    def _split(self, key: _Key) -> list[Tensor]:
        """Split a parameter into the slices of its tensors."""
        weight = self._bound[key].compute_weight()
        # Thousands of experts are split alike, and finding the slices takes longer than the GPU takes to copy them.
        form, begin = (key[0], weight.shape, weight.stride()), weight.storage_offset()
        if form not in self._views:
            slices = self._list_slices(key)
            tensors = split_parameter(self._entries[key[0]], weight, slices, self._rank.shape)
            if any(tensor.untyped_storage() is not weight.untyped_storage() for tensor in tensors):
                return tensors  # copies, since the slices are no views of the parameter
            self._views[form] = [(part.shape, part.stride(), int(part.storage_offset() - begin)) for part in tensors]
        return [weight.as_strided(sizes, strides, begin + offset) for sizes, strides, offset in self._views[form]]

    def _locate(self, piece: Any) -> _Position:
        _, row, _, layer, expert = self._tensors[piece["tensor"]]
        ranges, section = read_ranges(piece), int(piece["section"])
        key = row, layer, ranges[0].begin if self._entries[row].is_stacked else expert
        indices = (
            Range(index.begin - first.begin, index.end - first.begin, index.step)
            for index, first in zip(ranges, find_ranges(self._list_slices(key)[section]), strict=True)
        )
        return key, section, to_slices(tuple(indices))

    def _list_slices(self, key: _Key) -> list[WeightSlice]:
        entry, layer, expert = self._entries[key[0]], key[1], key[2]
        part = self._shard.find_split(entry)
        return entry.list_slices(self._rank.shape, layer, part.index, part.count, expert)


def connect_shards(rank: PolicyRank, rendezvous: Rendezvous) -> None:
    """Join the group of all ranks, and test this rank's links."""
    rank.weight_sender = None
    from megatron.core import parallel_state

    number = torch.distributed.get_rank()
    # The plan's layout follows from the configuration alone, and must equal Megatron-Core's.
    layers = tuple(layer for chunk in rank.chunks for layer in list_layers(chunk))
    tensor = parallel_state.get_tensor_model_parallel_rank()
    shard = split_policy(rank.config.parallel, rank.shape)[number]
    assert (layers, tensor) == (shard.layers, shard.tensor.index), f"planned for {shard}, has {layers}, {tensor}"
    links = SourceLinks(rendezvous, number, rank.platform.device, list(measure_tensors(rank.shape)))
    rank.weight_sender = ShardSender(rank, shard, links)


@torch.no_grad()
def send_shards(rank: PolicyRank, version: int) -> tuple[int, int, int]:
    assert isinstance(rank.weight_sender, ShardSender), "connect_shards() comes first"
    return rank.weight_sender.send(version)
