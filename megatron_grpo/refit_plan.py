"""Plans a refit without GPUs, and prints how much it moves: python -m megatron_grpo.refit_plan +exp=…"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.section import PositiveFloat
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.platform.hardware import find_hardware
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.refit_memory import needs_conversion

USAGE = """\
python -m megatron_grpo.refit_plan +exp=NAME key=value … [--gb-per-s=N] [--json]

  +exp=NAME     a recipe, and keys of it to change, as for megatron_grpo.train
  --gb-per-s=N  speed at which each rank sends and receives, in 10^9 bytes a second (50: one 400 Gb/s port a GPU)
  --json        print one JSON object instead of a table

Plans the refit of refit.mode=reshard from the layouts of policy and generation; needs no GPU. What vLLM's ranks keep is
traced from its loaders, in a process that builds its model without weights; it takes seconds and is cached. Where vLLM
is not installed, ranks are assumed to cut matrices as Megatron-Core does.
"""
_OPTIONS = {"--gb-per-s": PositiveFloat, "--json": bool}


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
    # Here, because torch takes long to import.
    from megatron_grpo.planning.meta_engine import trace_run
    from megatron_grpo.planning.refit_summary import estimate_nccl, find_lone_adapters, summarize_refit

    layouts = policy.parallel, config.generation.parallel
    bucket, boxes = int(config.refit.bucket_mib * 2**20), trace_run(config, shape)
    by_layer = needs_conversion(config, shape, find_hardware(config))
    summary = summarize_refit(
        shape,
        *layouts,
        policy.precision,
        bucket,
        config.refit.fp8_blocks,
        boxes,
        by_layer=by_layer,
        adapters=find_lone_adapters(config, shape),
    )
    nccl = estimate_nccl(config, summary)
    if "json" in parsed.options:
        print(json.dumps({**summary.as_dict(speed * 1e9), "nccl": nccl}, indent=2))
    else:
        print("\n".join(summary.render_table(nccl, speed * 1e9)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
