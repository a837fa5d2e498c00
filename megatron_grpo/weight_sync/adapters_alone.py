"""Refits that send adapters alone (refit.adapters=alone): the driver's plan, and a policy rank's sender."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.models.adapter_names import measure_adapters, name_matrix
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.hf_weights import iter_adapter_tensors
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard
from megatron_grpo.models.weight_map import index_tensors
from megatron_grpo.weight_sync.boxes import Box
from megatron_grpo.weight_sync.pieces import DIMENSIONS, NO_RELAY, PIECE, Pieces
from megatron_grpo.weight_sync.refit_group import Rendezvous
from megatron_grpo.weight_sync.shard_sender import SourceLinks, pack_piece
from megatron_grpo.weight_sync.transfer_plan import schedule_messages

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


def plan_adapters(
    shape: ModelShape,
    adapters: Mapping[str, Sequence[int]],
    policy_shards: Sequence[RankShard],
    engine: Sequence[Sequence[Box]],
    engine_count: int,
    precision: str,
    bucket_bytes: int,
    *,
    devices_per_node: int | None = None,
) -> Pieces:
    """Plan which matrices A and B each engine rank gets.

    A rank gets those of the weights that it keeps a part of, from the first rank of the policy's stage, and vLLM takes
    the rank's part of them. `adapters`: shapes by name (`measure_adapters`); the other arguments as for
    `transfer_plan.plan_messages`.
    """
    keys = index_tensors(build_weight_map(shape), shape)
    senders: dict[int, int] = {}  # first rank of the stage, by layer
    for rank, shard in enumerate(policy_shards):
        for layer in shard.layers:
            senders.setdefault(layer, rank)
    rows = []
    for engine_rank, boxes in enumerate(engine):
        rank_tensors = {box.tensor for box in boxes}
        for number, (name, sizes) in enumerate(adapters.items()):
            matrix = name_matrix(name)
            if matrix in rank_tensors:
                ranges = [(0, size, 1) for size in sizes] + [(0, 0, 0)] * (DIMENSIONS - len(sizes))
                nbytes = math.prod(sizes) * getattr(torch, precision).itemsize
                source = senders[keys[matrix].layer]
                rows.append((source, engine_rank, NO_RELAY, 0, number, 0, ranges, 0, nbytes, 0))
    pieces = np.tile(np.array(rows, dtype=PIECE), engine_count)
    pieces["target"] += np.repeat(np.arange(engine_count, dtype=np.int32) * len(engine), len(rows))
    if devices_per_node is not None:
        nodes = (pieces[side] // devices_per_node for side in ("source", "target"))
        pieces["relay"] = np.where(np.equal(*nodes), NO_RELAY, pieces["target"])
    return schedule_messages(pieces, bucket_bytes)


class AdapterSender:
    """The sending end of a policy rank's links; only first ranks of stages send."""

    def __init__(self, rank: PolicyRank, rendezvous: Rendezvous) -> None:
        self._rank = rank
        self._names = list(measure_adapters(rank.shape, rank.config.lora))
        self.links = SourceLinks(rendezvous, torch.distributed.get_rank(), rank.platform.device, self._names)

    def send(self, version: int) -> tuple[int, int, int]:
        """Send a version; return its bytes (with checksums), matrices and messages."""
        gathered = iter_adapter_tensors(self._rank.gather_chunks(), self._rank.shape, Tensor.detach)
        tensors = {name: tensor for name, tensor in gathered if tensor is not None}
        links = self.links

        def fill(number: int, message: Tensor) -> None:
            for piece, packed in zip(links.messages[number], links.packed_pieces[number], strict=True):
                pack_piece(packed, message, tensors[self._names[piece["tensor"]]])

        links.send(fill, version)
        filled = [number for number, is_relayed in enumerate(links.is_relayed) if not is_relayed]
        return (
            sum(links.sizes[number] for number in filled),
            sum(len(links.messages[number]) for number in filled),
            len(filled),
        )


def connect_adapters(rank: PolicyRank, rendezvous: Rendezvous) -> None:
    """Join the group of all ranks, and test this rank's links."""
    rank.weight_sender = None
    rank.weight_sender = AdapterSender(rank, rendezvous)


@torch.no_grad()
def send_adapters(rank: PolicyRank, version: int) -> tuple[int, int, int]:
    assert isinstance(rank.weight_sender, AdapterSender), "connect_adapters() comes first"
    return rank.weight_sender.send(version)
