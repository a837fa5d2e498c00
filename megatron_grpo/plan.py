"""Plans a run without GPUs: memory, time, layouts: python -m megatron_grpo.plan +exp=… cluster.gpu=h100"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.help import FAILED, run_command
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.proof.plan.memory import GIB
from megatron_grpo.proof.plan.trace import tracing
from megatron_grpo.proof.plan.whole import Plan, make_plan, profile
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.source import download_config, known_shape

USAGE = """\
python -m megatron_grpo.plan +exp=NAME cluster.gpu=h100 [cluster.nodes=N] [key=value …] [--json]

  +exp=NAME      a recipe, and keys of it to change, as for megatron_grpo.train; plan.* are the plan's own
  cluster.gpu=G  a100, h100, h200, b200 or gb200; or plan.hardware=FILE.yaml
  --json         print one JSON object instead of a table

Says whether a run fits, and how long a step takes, from dry runs of its ranks; needs no GPU and no weights, only the
model's config.json. Exit code 1: the run does not fit.
"""
_PRETRAIN = "plan.workload=pretrain"


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return run_command("plan: ", arguments, USAGE, _plan, failures=(RunError,))


def _plan(arguments: Sequence[str]) -> int:
    as_json, overrides = _options(arguments)
    config, shape = _read(overrides)
    with tracing() as pool:
        plan = make_plan(config, shape, pool)
    print(json.dumps(plan.as_dict(), indent=1) if as_json else "\n".join(_table(plan)))
    return 0 if not plan.problems else FAILED


def _read(overrides: Sequence[str]) -> tuple[Config, ModelShape]:
    """The configuration of a command line, and the sizes of its model.

    Raises:
        ConfigError: names every problem.
    """
    # A plain training step has no engines, which would take GPUs; a run without them reads a recording.
    fixed = ["debug.rollouts_from=none"] if _PRETRAIN in overrides else []
    config = compose_config([*overrides, *fixed])
    profile(config)
    if not config.cluster.gpus:
        raise ConfigError([Problem("cluster.gpus_per_node=0", "is a run on CPU; give the GPUs of a node")])
    shape, path = known_shape(config), config.policy.model.path
    if shape is None and is_hub_name(path):
        reason = download_config(path)
        shape = known_shape(config)
        if shape is not None:
            return compose_config([*overrides, *fixed]), shape  # its checks against the model are still due
        text = f"is not on this machine, and could not be downloaded ({reason}); give a folder with its config.json"
        raise ConfigError([Problem(f"policy.model.path={path}", text)])
    if shape is None:
        raise ConfigError([Problem(f"policy.model.path={path}", "is no folder with the model's config.json")])
    return config, shape


def _options(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """(whether to print JSON, the arguments that belong to the recipe)."""
    overrides = []
    for word in arguments:
        if word.startswith("--") and word != "--json" and not word.startswith("--config-dir"):
            raise ValueError(f"{word} is no option; there is --json")
        if word != "--json":
            overrides.append(word)
    return "--json" in arguments, overrides


def _table(plan: Plan) -> Iterator[str]:
    worst, config, has = plan.fullest, plan.config, plan.hardware.memory_gib
    verdict = "does not fit" if plan.problems else "fits"
    yield (
        f"{config.name} on {config.cluster.num_nodes} x {config.cluster.gpus} {plan.hardware.name}: {verdict}; "
        f"the fullest GPU takes {worst.peak / GIB:.1f} of {has:.1f} GiB"
    )
    yield from (f"  {one}" for one in plan.problems)
    yield ""
    names = list(dict.fromkeys(name for rank in plan.ranks for name in rank.phases))
    yield "tensors in GiB  layers  experts  " + "".join(f"{name:>12}" for name in names) + "     reserve        peak"
    for rank in plan.ranks:
        sizes = "".join(f"{rank.phases[name] / GIB:12.2f}" if name in rank.phases else " " * 12 for name in names)
        skew = f"x {rank.expert_skew:g}" if plan.shape.experts is not None else ""
        yield (
            f"policy stage {rank.stage:<3}{rank.layers:6}  {skew:>7}  {sizes}{rank.reserve / GIB:12.2f}"
            f"{rank.peak / GIB:12.2f}"
        )
    yield ""
    yield f"largest tensors at the peak of stage {worst.stage}, in {worst.phase}:"
    for one in worst.holders[:6]:
        each = "" if not one.bytes_per_layer else f", {one.bytes_per_layer / GIB:.3f} for each of {one.layers} layers"
        yield f"  {one.bytes / GIB:7.2f} GiB  {one.kind}{each}"
    yield ""
    if plan.times is not None:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.times.phase_s.items())
        kind = "" if plan.times.asynchronous_s is None else f" ({plan.times.synchronous_s:.1f} s if synchronous)"
        yield f"a step: {plan.times.step_s:.1f} s{kind}, {plan.times.tokens_per_s_per_gpu:,.0f} tokens a second and GPU"
        yield f"  seconds by phase: {phases}"
        yield ""
    yield from (f"assumed: {one}" for one in plan.assumptions)
    yield f"planned in {plan.planned_s:.0f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
