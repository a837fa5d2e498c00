"""Plans a refit without GPUs, and prints how much it moves: python -m megatron_grpo.refit_plan +exp=…"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.section import PositiveFloat
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.planning.refit_summary import RankLoad, RefitSummary, summarize_refit
from megatron_grpo.preflight.engine_checks import NCCL_RECEIVING, NCCL_SENDING, estimate_nccl_bytes
from megatron_grpo.preflight.load import compose_config

USAGE = """\
python -m megatron_grpo.refit_plan +exp=NAME key=value … [--gb-per-s=N] [--json]

  +exp=NAME     a recipe, and keys of it to change, as for megatron_grpo.train
  --gb-per-s=N  speed at which each rank sends and receives, in 10^9 bytes a second (50: one 400 Gb/s port a GPU)
  --json        print one JSON object instead of a table

Plans the refit of refit.mode=reshard from the layouts of policy and generation; starts no process and needs no GPU.
"""
_OPTIONS = {"--gb-per-s": PositiveFloat, "--json": bool}
_MOST_LINKS = 32  # more links are not listed one by one


@as_command("refit_plan", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Plan a refit, and print its numbers; return the exit code."""
    parsed = parse_arguments(arguments, _OPTIONS, is_override=lambda name: not name.startswith("--"))
    speed = parsed.options.get("gb_per_s", 50.0)
    config = compose_config(parsed.overrides)
    shape, policy = find_model_shape(config), config.policy
    if shape is None:
        path = f"policy.model.path={policy.model.path}"
        raise ConfigError([Problem(path, "is not on this machine; give a folder with the model's config.json")])
    layouts, bucket = (policy.parallel, config.generation.parallel), int(config.refit.bucket_mib * 2**20)
    summary = summarize_refit(shape, *layouts, policy.precision, bucket, config.refit.fp8_blocks)
    receiving = estimate_nccl_bytes(config, summary.receiving.most_peers, NCCL_RECEIVING)
    nccl = {
        "communicators": 1 if receiving else 0,
        "ranks": summary.sending.ranks + summary.receiving.ranks if receiving else 0,
        "sending_bytes": estimate_nccl_bytes(config, summary.sending.most_peers, NCCL_SENDING),
        "receiving_bytes": receiving,
    }
    if "json" in parsed.options:
        print(json.dumps({**summary.as_dict(speed * 1e9), "nccl": nccl}, indent=2))
    else:
        print("\n".join(_format_table(summary, nccl, speed)))
    return 0


def _format_table(summary: RefitSummary, nccl: dict[str, int], speed: float) -> list[str]:
    lines = [
        f"{_format_bytes(summary.bytes)} in {summary.messages:,} messages of {summary.pieces:,} slices, "
        f"planned in {summary.planned_s:.2f} s",
        f"policy:     {_format_side(summary.sending, 'sends', 'workers')}",
        f"generation: {_format_side(summary.receiving, 'receives', 'ranks of the policy')}",
        f"estimated:  {summary.compute_seconds(speed * 1e9):.3f} s at {speed:g} GB/s a rank",
    ]
    if nccl["communicators"]:
        sending, receiving = _format_bytes(nccl["sending_bytes"]), _format_bytes(nccl["receiving_bytes"])
        text = f"{sending} of a GPU that sends, {receiving} of one that receives"
        lines.append(f"NCCL:       one communicator of {nccl['ranks']:,} ranks, up to {text}")
    if len(summary.links) <= _MOST_LINKS:
        lines += [
            f"  policy rank {rank} -> worker {worker}: {_format_bytes(size)}"
            for (rank, worker), size in sorted(summary.links.items())
        ]
    return lines


def _format_side(load: RankLoad, verb: str, peers: str) -> str:
    sizes = f"{_format_bytes(load.bytes['smallest'])} to {_format_bytes(load.bytes['largest'])}"
    return f"{load.ranks:,} ranks, each {verb} {sizes}, with at most {load.most_peers:,} {peers}"


def _format_bytes(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
