"""A planned refit in numbers: bytes and messages of each side, and the seconds of its busiest rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.adapter_names import measure_adapters
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.refit_memory import NCCL_RECEIVING, NCCL_SENDING, estimate_nccl_bytes, needs_conversion
from megatron_grpo.weight_sync.adapters_alone import plan_adapters
from megatron_grpo.weight_sync.boxes import Box
from megatron_grpo.weight_sync.pieces import NO_RELAY, Pieces
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages

MOST_LINKS = 32  # more links are not listed one by one
MESSAGE_S = 50e-6
"""Assumed seconds for each message in addition to the time for its bytes."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Load of a refit on the policy's ranks, or on the engines'."""

    ranks: int
    bytes: dict[str, int]
    """Fewest and most bytes that a rank moves, as "smallest" and "largest"."""
    most_peers: int
    """Most ranks of the other side that one rank exchanges messages with."""

    def describe(self, verb: str, peers: str) -> str:
        sizes = f"{_format_bytes(self.bytes['smallest'])} to {_format_bytes(self.bytes['largest'])}"
        return f"{self.ranks:,} ranks, each {verb} {sizes}, with at most {self.most_peers:,} {peers}"


@dataclass(frozen=True, slots=True)
class RefitSummary:
    """A planned refit in numbers."""

    sending: RankLoad
    receiving: RankLoad
    bytes: int
    relayed_bytes: int
    """Most that a rank of the policy sends to another node, or receives from there, beside engines on its GPUs."""
    pieces: int
    pieces_of_rank: int
    """Most slices that one rank packs or unpacks."""
    messages: int
    turns: int
    """Most messages of a rank, one after the other."""
    links: dict[tuple[int, int], int]
    """Bytes by (rank of the policy, rank of the engines)."""
    planned_s: float

    def compute_seconds(self, bytes_per_s: float) -> float:
        """Compute the busiest rank's seconds, if every rank has this speed."""
        busiest = max(self.sending.bytes["largest"], self.receiving.bytes["largest"])
        return busiest / bytes_per_s + self.turns * MESSAGE_S

    def as_dict(self, bytes_per_s: float) -> dict[str, Any]:
        """Convert to JSON, without the links."""
        return {
            **{name: value for name, value in asdict(self).items() if name != "links"},
            "planned_s": round(self.planned_s, 3),
            "assumed_bytes_per_s": bytes_per_s,
            "estimated_s": round(self.compute_seconds(bytes_per_s), 4),
        }

    def render_table(self, nccl: dict[str, int], bytes_per_s: float) -> list[str]:
        """Render lines for a terminal, with the memory of NCCL's communicator."""
        lines = [
            f"{_format_bytes(self.bytes)} in {self.messages:,} messages of {self.pieces:,} slices, "
            f"planned in {self.planned_s:.2f} s",
            f"policy:     {self.sending.describe('sends', 'workers')}",
            f"generation: {self.receiving.describe('receives', 'ranks of the policy')}",
            f"estimated:  {self.compute_seconds(bytes_per_s):.3f} s at {bytes_per_s / 1e9:g} GB/s a rank",
        ]
        if nccl["communicators"]:
            sending, receiving = _format_bytes(nccl["sending_bytes"]), _format_bytes(nccl["receiving_bytes"])
            text = f"{sending} of a GPU that sends, {receiving} of one that receives"
            lines.append(f"NCCL:       one communicator of {nccl['ranks']:,} ranks, up to {text}")
        links = sorted(self.links.items()) if len(self.links) <= MOST_LINKS else []
        lines += [f"  policy rank {rank} -> worker {worker}: {_format_bytes(size)}" for (rank, worker), size in links]
        return lines


def _format_bytes(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def find_lone_adapters(config: Config, shape: ModelShape) -> dict[str, tuple[int, int]] | None:
    """Measure adapters that are sent alone; None: weights are sent."""
    is_alone = config.refit.adapters == "alone" and config.policy.lora.rank
    return measure_adapters(shape, config.policy.lora) if is_alone else None


def summarize_refit(
    shape: ModelShape,
    training: ParallelConfig,
    generation: GenerationParallelConfig,
    precision: str,
    bucket_bytes: int,
    fp8_blocks: bool = False,
    engine: Sequence[Sequence[Box]] | None = None,
    *,
    by_layer: bool = False,
    devices_per_node: int | None = None,
    adapters: Mapping[str, Sequence[int]] | None = None,
) -> RefitSummary:
    """Plan a refit and count what it moves.

    Args:
        shape: sizes of the model.
        training: layout of the policy.
        generation: layout of the engines.
        precision: type of the policy's weights, "float32" or "bfloat16".
        bucket_bytes: most bytes of a message.
        fp8_blocks: whether matrices of the layers are sent in FP8.
        engine: traced boxes of an engine's ranks; None: those of `assume_boxes`.
        by_layer: whether engines convert layers (`refit_memory.needs_conversion`), one after another.
        devices_per_node: of engines on the policy's devices; None: they have their own.
        adapters: shapes of A and B by name (`find_lone_adapters`), which are sent alone; None: weights are sent.
    """
    began = time.perf_counter()
    sources, engine = split_policy(training, shape), engine or assume_boxes(shape, generation)
    if adapters is not None:
        arguments = shape, adapters, sources, engine, generation.data, precision, bucket_bytes
        scheduled = plan_adapters(*arguments, devices_per_node=devices_per_node)
    else:
        options: dict[str, Any] = {"devices_per_node": devices_per_node, "by_layer": by_layer}
        dtypes = choose_wire_dtypes(shape, precision, fp8_blocks)
        scheduled = plan_messages(shape, sources, engine, generation.data, dtypes, bucket_bytes, **options)
    relayed = scheduled[scheduled["relay"] != NO_RELAY]
    far = (np.bincount(relayed[side], weights=relayed["bytes"], minlength=1) for side in ("source", "relay"))
    planned_s = time.perf_counter() - began
    targets = len(engine) * generation.data
    # Pairs of ranks as one number, and messages, which are pieces of one source and turn, too: sorting is fast then.
    codes, inverse = np.unique(
        scheduled["source"].astype(np.int64) * targets + scheduled["target"], return_inverse=True
    )
    sums = np.bincount(inverse, weights=scheduled["bytes"]).astype(np.int64)
    links = {(int(code) // targets, int(code) % targets): int(size) for code, size in zip(codes, sums, strict=True)}
    message_keys = scheduled["source"].astype(np.int64) * (int(scheduled["turn"].max()) + 1) + scheduled["turn"]
    return RefitSummary(
        sending=_load(scheduled, "source", len(sources), codes // targets),
        receiving=_load(scheduled, "target", targets, codes % targets),
        bytes=int(scheduled["bytes"].sum()),
        relayed_bytes=int(max(loads.max() for loads in far)),
        pieces=len(scheduled),
        pieces_of_rank=max(int(np.bincount(scheduled[side]).max()) for side in ("source", "target")),
        messages=len(np.unique(message_keys)),
        turns=int(scheduled["turn"].max()) + 1,
        links=links,
        planned_s=planned_s,
    )


def estimate_nccl(config: Config, summary: RefitSummary) -> dict[str, int]:
    """Estimate a refit's communicators, and their bytes on a GPU of each side."""
    receiving = estimate_nccl_bytes(config, summary.receiving.most_peers, NCCL_RECEIVING)
    return {
        "communicators": 1 if receiving else 0,
        "ranks": summary.sending.ranks + summary.receiving.ranks if receiving else 0,
        "sending_bytes": estimate_nccl_bytes(config, summary.sending.most_peers, NCCL_SENDING),
        "receiving_bytes": receiving,
    }


def _load(scheduled: Pieces, side: str, ranks: int, of_links: np.ndarray) -> RankLoad:
    moved = np.bincount(scheduled[side], weights=scheduled["bytes"], minlength=ranks)
    sizes = {"smallest": int(moved.min()), "largest": int(moved.max())}
    return RankLoad(ranks, sizes, int(np.bincount(of_links).max()))


def time_refit(config: Config, shape: ModelShape, hardware: Hardware) -> tuple[float, int]:
    """Compute the seconds and bytes of a refit from its transfer plan."""
    summary = summarize_run(config, shape, hardware)
    return time_transfer(config, summary, hardware), summary.bytes


def summarize_run(config: Config, shape: ModelShape, hardware: Hardware) -> RefitSummary:
    """Plan the refit of a run on this hardware and count what it moves."""
    policy, generation = config.policy, config.generation
    return summarize_refit(
        shape,
        policy.parallel,
        generation.parallel,
        policy.precision,
        int(config.refit.bucket_mib * 2**20),
        config.refit.fp8_blocks,
        by_layer=needs_conversion(config, shape, hardware),
        devices_per_node=(config.cluster.gpus or policy.parallel.world_size) if generation.is_colocated else None,
        adapters=find_lone_adapters(config, shape),
    )


def time_transfer(config: Config, summary: RefitSummary, hardware: Hardware) -> float:
    """Compute the seconds of a planned refit.

    Calls and commit come before and after the messages. Hosts pack and unpack slices while others travel.
    """
    policy, generation, efficiency = config.policy, config.generation, hardware.efficiency
    engines = generation.parallel.data * generation.parallel.ranks_per_engine
    together = generation.is_colocated or policy.parallel.world_size + engines <= hardware.gpus_per_domain
    port = hardware.network_bytes_per_s * efficiency.network * efficiency.refit
    messages_s = summary.compute_seconds(hardware.local_bytes_per_s * efficiency.nvlink if together else port)
    host_s = summary.pieces_of_rank * efficiency.refit_piece_s
    return efficiency.refit_s + max(messages_s, host_s) + summary.relayed_bytes / port
