"""Runs on the driver: plans a refit that sends adapters alone (refit.adapters=alone)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_grpo.models.adapter_names import name_matrix
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard
from megatron_grpo.models.weight_map import index_tensors
from megatron_grpo.weight_sync.boxes import Box
from megatron_grpo.weight_sync.pieces import NO_RELAY, PIECE, Pieces
from megatron_grpo.weight_sync.transfer_plan import schedule_messages


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
                ranges = [(0, size, 1) for size in sizes] + [(0, 0, 0)] * (4 - len(sizes))
                nbytes = math.prod(sizes) * getattr(torch, precision).itemsize
                source = senders[keys[matrix].layer]
                rows.append((source, engine_rank, NO_RELAY, 0, number, 0, ranges, 0, nbytes, 0))
    pieces = np.tile(np.array(rows, dtype=PIECE), engine_count)
    pieces["target"] += np.repeat(np.arange(engine_count, dtype=np.int32) * len(engine), len(rows))
    if devices_per_node is not None:
        nodes = (pieces[side] // devices_per_node for side in ("source", "target"))
        pieces["relay"] = np.where(np.equal(*nodes), NO_RELAY, pieces["target"])
    return schedule_messages(pieces, bucket_bytes)
