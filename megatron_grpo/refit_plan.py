"""Tells what a refit of a recipe will move, before a GPU is asked for: python -m megatron_grpo.refit_plan +exp=…"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from megatron_grpo.composition.help import answered
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.source import known_shape
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.refit.reshard.outlook import Load, RefitOutlook, refit_outlook

USAGE = """\
python -m megatron_grpo.refit_plan +exp=NAME key=value … [--gb-per-s=N] [--json]

  +exp=NAME     a recipe, and keys of it to change, as for megatron_grpo.train
  --gb-per-s=N  speed at which each rank sends and receives, in 10^9 bytes a second (50: one 400 Gb/s port a GPU)
  --json        print one JSON object instead of a table

Plans the refit of refit.mode=reshard from the layouts of policy and generation; starts no process and needs no GPU.
"""
MISTAKE = 2
"""Exit code of a command line that cannot be run."""
_SPEED = "--gb-per-s"
_DEFAULT_SPEED = 50.0
_LINKS_SHOWN = 32
"""Links that are listed one by one; more of them are only summed up."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    if answered(arguments, USAGE):
        return 0
    try:
        speed, as_json, overrides = _options(arguments)
        config = compose_config(overrides)
        outlook = _outlook(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    if as_json:
        print(json.dumps(outlook.as_dict(speed * 1e9), indent=2))
    else:
        print("\n".join(_table(outlook, speed)))
    return 0


def _options(arguments: Sequence[str]) -> tuple[float, bool, list[str]]:
    """(speed in GB/s, whether to print JSON, the words that are of the recipe)."""
    speed, overrides = _DEFAULT_SPEED, []
    for word in arguments:
        name, _, value = word.partition("=")
        if name == _SPEED:
            speed = _number(value)
        elif word.startswith("--") and word != "--json":
            raise ConfigError([Problem(word, f"is no option; there are {_SPEED}=N and --json")])
        elif word != "--json":
            overrides.append(word)
    return speed, "--json" in arguments, overrides


def _number(value: str) -> float:
    try:
        speed = float(value)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ConfigError(
            [Problem(f"{_SPEED}={value}", f"must be a number above 0; {_DEFAULT_SPEED:g} is the default")]
        )
    return speed


def _outlook(config: Config) -> RefitOutlook:
    shape = known_shape(config)
    if shape is None:
        path = f"policy.model.path={config.policy.model.path}"
        raise ConfigError([Problem(path, "is not on this machine; give a folder with the model's config.json")])
    policy, refit = config.policy, config.refit
    layouts = policy.parallel, config.generation.parallel
    return refit_outlook(shape, *layouts, policy.precision, int(refit.bucket_mib * 2**20), refit.fp8_blocks)


def _table(outlook: RefitOutlook, speed: float) -> list[str]:
    lines = [
        f"{_size(outlook.bytes)} in {outlook.messages:,} messages of {outlook.pieces:,} slices, "
        f"planned in {outlook.planned_s:.2f} s",
        f"policy:     {_side(outlook.sending, 'sends', 'workers')}",
        f"generation: {_side(outlook.receiving, 'receives', 'ranks of the policy')}",
        f"estimated:  {outlook.seconds(speed * 1e9):.3f} s at {speed:g} GB/s a rank",
    ]
    if len(outlook.links) <= _LINKS_SHOWN:
        lines += [f"  policy rank {a} -> worker {b}: {_size(size)}" for (a, b), size in sorted(outlook.links.items())]
    return lines


def _side(load: Load, verb: str, peers: str) -> str:
    each = f"{_size(load.smallest)} to {_size(load.largest)}"
    return f"{load.ranks:,} ranks, each {verb} {each}, with at most {load.most_peers:,} {peers}"


def _size(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
