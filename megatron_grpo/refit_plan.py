"""Plans a refit without GPUs, and prints how much it moves: python -m megatron_grpo.refit_plan +exp=…"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.help import run_command
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.config.section import PositiveFloat
from megatron_grpo.config.typed import converted
from megatron_grpo.preflight.engines import NCCL_RECEIVING, NCCL_SENDING, nccl_bytes
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.weights.layouts import engine_shards, training_shards
from megatron_grpo.weights.refit.links import schedule
from megatron_grpo.weights.refit.plan import Pieces, plan_pieces, wire_dtypes
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.source import known_shape

MESSAGE_S = 50e-6
"""Assumed seconds for each message in addition to the time for its bytes."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Load of the ranks of one side of a refit, the policy or the engines."""

    ranks: int
    bytes: dict[str, int]
    """Fewest and most bytes that a rank moves, as "smallest" and "largest"."""
    most_peers: int
    """Most ranks of the other side that one rank exchanges messages with."""


@dataclass(frozen=True, slots=True)
class RefitSummary:
    """A planned refit in numbers."""

    sending: RankLoad
    receiving: RankLoad
    bytes: int
    pieces: int
    messages: int
    turns: int
    """Largest number of consecutive messages of a rank."""
    links: dict[tuple[int, int], int]
    """Bytes by (rank of the policy, rank of the engines)."""
    planned_s: float

    def seconds(self, bytes_per_s: float) -> float:
        """Estimated seconds of the busiest rank, if every rank sends and receives at this speed."""
        busiest = max(self.sending.bytes["largest"], self.receiving.bytes["largest"])
        return busiest / bytes_per_s + self.turns * MESSAGE_S

    def as_dict(self, bytes_per_s: float) -> dict[str, Any]:
        """All numbers except the links, for JSON."""
        return {
            **{name: value for name, value in asdict(self).items() if name != "links"},
            "planned_s": round(self.planned_s, 3),
            "assumed_bytes_per_s": bytes_per_s,
            "estimated_s": round(self.seconds(bytes_per_s), 4),
        }


def refit_summary(
    shape: ModelShape,
    training: ParallelConfig,
    generation: GenerationParallelConfig,
    precision: str,
    bucket_bytes: int,
    fp8_blocks: bool = False,
) -> RefitSummary:
    """Plan a refit and count what it moves.

    Args:
        shape: sizes of the model.
        training: layout of the policy.
        generation: layout of the engines.
        precision: type of the policy's weights, "float32" or "bfloat16".
        bucket_bytes: most bytes of a message.
        fp8_blocks: whether matrices of the layers are sent in FP8.
    """
    began = time.perf_counter()
    sources, engine = training_shards(training, shape), engine_shards(generation, shape)
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
    return RefitSummary(
        sending=_load(scheduled, "source", len(sources), codes // targets),
        receiving=_load(scheduled, "target", targets, codes % targets),
        bytes=int(scheduled["bytes"].sum()),
        pieces=len(scheduled),
        messages=len(np.unique(message_keys)),
        turns=int(scheduled["turn"].max()) + 1,
        links=links,
        planned_s=planned_s,
    )


def _load(scheduled: Pieces, side: str, ranks: int, of_links: np.ndarray) -> RankLoad:
    moved = np.bincount(scheduled[side], weights=scheduled["bytes"], minlength=ranks)
    sizes = {"smallest": int(moved.min()), "largest": int(moved.max())}
    return RankLoad(ranks, sizes, int(np.bincount(of_links).max()))


USAGE = """\
python -m megatron_grpo.refit_plan +exp=NAME key=value … [--gb-per-s=N] [--json]

  +exp=NAME     a recipe, and keys of it to change, as for megatron_grpo.train
  --gb-per-s=N  speed at which each rank sends and receives, in 10^9 bytes a second (50: one 400 Gb/s port a GPU)
  --json        print one JSON object instead of a table

Plans the refit of refit.mode=reshard from the layouts of policy and generation; starts no process and needs no GPU.
"""
_SPEED = "--gb-per-s"
_DEFAULT_SPEED = 50.0
_LINKS_SHOWN = 32
"""Most links that are listed one by one."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return run_command("", arguments, USAGE, _plan)


def _plan(arguments: Sequence[str]) -> int:
    speed, as_json, overrides = _options(arguments)
    config = compose_config(overrides)
    shape, policy = known_shape(config), config.policy
    if shape is None:
        path = f"policy.model.path={policy.model.path}"
        raise ConfigError([Problem(path, "is not on this machine; give a folder with the model's config.json")])
    layouts, bucket = (policy.parallel, config.generation.parallel), int(config.refit.bucket_mib * 2**20)
    summary = refit_summary(shape, *layouts, policy.precision, bucket, config.refit.fp8_blocks)
    nccl = _nccl(config, summary)
    if as_json:
        print(json.dumps({**summary.as_dict(speed * 1e9), "nccl": nccl}, indent=2))
    else:
        print("\n".join(_table(summary, nccl, speed)))
    return 0


def _nccl(config: Config, summary: RefitSummary) -> dict[str, int]:
    """NCCL communicators of a rank, their ranks, and the bytes that they take of a GPU, at most, on either side."""
    sending = nccl_bytes(config, summary.sending.most_peers, NCCL_SENDING)
    receiving = nccl_bytes(config, summary.receiving.most_peers, NCCL_RECEIVING)
    ranks = summary.sending.ranks + summary.receiving.ranks
    return {
        "communicators": 1 if receiving else 0,
        "ranks": ranks if receiving else 0,
        "sending_bytes": sending,
        "receiving_bytes": receiving,
    }


def _options(arguments: Sequence[str]) -> tuple[float, bool, list[str]]:
    """(speed in GB/s, whether to print JSON, the arguments that belong to the recipe)."""
    speed, overrides = _DEFAULT_SPEED, []
    for word in arguments:
        name, _, value = word.partition("=")
        if name == _SPEED:
            speed = converted(name, value, PositiveFloat)
        elif word.startswith("--") and word != "--json":
            raise ValueError(f"{word} is no option; there are {_SPEED}=N and --json")
        elif word != "--json":
            overrides.append(word)
    return speed, "--json" in arguments, overrides


def _table(summary: RefitSummary, nccl: dict[str, int], speed: float) -> list[str]:
    lines = [
        f"{_size(summary.bytes)} in {summary.messages:,} messages of {summary.pieces:,} slices, "
        f"planned in {summary.planned_s:.2f} s",
        f"policy:     {_side(summary.sending, 'sends', 'workers')}",
        f"generation: {_side(summary.receiving, 'receives', 'ranks of the policy')}",
        f"estimated:  {summary.seconds(speed * 1e9):.3f} s at {speed:g} GB/s a rank",
    ]
    if nccl["communicators"]:
        sizes = (
            f"{_size(nccl['sending_bytes'])} of a GPU that sends, {_size(nccl['receiving_bytes'])} of one that receives"
        )
        lines.append(f"NCCL:       one communicator of {nccl['ranks']:,} ranks, up to {sizes}")
    if len(summary.links) <= _LINKS_SHOWN:
        lines += [f"  policy rank {a} -> worker {b}: {_size(size)}" for (a, b), size in sorted(summary.links.items())]
    return lines


def _side(load: RankLoad, verb: str, peers: str) -> str:
    each = f"{_size(load.bytes['smallest'])} to {_size(load.bytes['largest'])}"
    return f"{load.ranks:,} ranks, each {verb} {each}, with at most {load.most_peers:,} {peers}"


def _size(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
