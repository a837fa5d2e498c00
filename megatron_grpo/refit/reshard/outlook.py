"""What a planned refit moves, and about how long it takes: from the plan alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.parallel_schema import ParallelConfig
from megatron_grpo.models.places import engine_places, training_places
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.refit.reshard.plan import Pieces, plan_pieces
from megatron_grpo.refit.reshard.schedule import schedule
from megatron_grpo.refit.reshard.wire import wire_dtypes

MESSAGE_S = 50e-6
"""Seconds that a message is taken to cost beside its bytes."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the ranks of one side move."""

    ranks: int
    smallest: int
    """Bytes of the rank that moves least."""
    largest: int
    """Bytes of the rank that moves most."""
    most_peers: int
    """Ranks of the other side that one rank talks to, at most."""


@dataclass(frozen=True, slots=True)
class RefitOutlook:
    """A planned refit in numbers."""

    sending: Load
    receiving: Load
    bytes: int
    pieces: int
    messages: int
    turns: int
    """Messages that some rank goes through one after the other."""
    links: dict[tuple[int, int], int]
    """Bytes by rank of the policy and rank of the engines."""
    planned_s: float

    def seconds(self, bytes_per_s: float) -> float:
        """About how long it takes where every rank sends and receives at this speed: as long as its busiest rank."""
        return max(self.sending.largest, self.receiving.largest) / bytes_per_s + self.turns * MESSAGE_S

    def as_dict(self, bytes_per_s: float) -> dict[str, Any]:
        """For JSON."""
        sides = {"sending": self.sending, "receiving": self.receiving}
        return {
            **{
                side: {
                    "ranks": load.ranks,
                    "bytes": {"smallest": load.smallest, "largest": load.largest},
                    "most_peers": load.most_peers,
                }
                for side, load in sides.items()
            },
            "bytes": self.bytes,
            "pieces": self.pieces,
            "messages": self.messages,
            "turns": self.turns,
            "planned_s": round(self.planned_s, 3),
            "assumed_bytes_per_s": bytes_per_s,
            "estimated_s": round(self.seconds(bytes_per_s), 4),
        }


def refit_outlook(
    shape: ModelShape,
    training: ParallelConfig,
    generation: GenerationParallelConfig,
    precision: str,
    bucket_bytes: int,
    fp8_blocks: bool = False,
) -> RefitOutlook:
    """Plan a refit and count what it moves.

    Args:
        shape: sizes of the model.
        training: layout of the policy.
        generation: layout of the engines.
        precision: of the policy's weights.
        bucket_bytes: most bytes of a message.
        fp8_blocks: whether matrices of the layers travel in FP8.
    """
    began = time.perf_counter()
    sources, engine = training_places(training, shape), engine_places(generation, shape)
    dtypes = wire_dtypes(shape, precision, fp8_blocks)
    scheduled = schedule(plan_pieces(shape, sources, engine, generation.data, dtypes, bucket_bytes // 2), bucket_bytes)
    planned_s = time.perf_counter() - began
    targets = len(engine) * generation.data
    codes, inverse = np.unique(
        scheduled["source"].astype(np.int64) * targets + scheduled["target"], return_inverse=True
    )
    sums = np.bincount(inverse, weights=scheduled["bytes"]).astype(np.int64)
    links = {(int(code) // targets, int(code) % targets): int(size) for code, size in zip(codes, sums, strict=True)}
    message_keys = scheduled["source"].astype(np.int64) * (int(scheduled["turn"].max()) + 1) + scheduled["turn"]
    return RefitOutlook(
        sending=_load(scheduled, "source", len(sources), codes // targets),
        receiving=_load(scheduled, "target", targets, codes % targets),
        bytes=int(scheduled["bytes"].sum()),
        pieces=len(scheduled),
        messages=len(np.unique(message_keys)),
        turns=int(scheduled["turn"].max()) + 1,
        links=links,
        planned_s=planned_s,
    )


def _load(scheduled: Pieces, side: str, ranks: int, of_links: np.ndarray) -> Load:
    moved = np.bincount(scheduled[side], weights=scheduled["bytes"], minlength=ranks)
    return Load(ranks, int(moved.min()), int(moved.max()), int(np.bincount(of_links).max()))
