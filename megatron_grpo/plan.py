"""Plans a run without GPUs: memory, time, layouts: python -m megatron_grpo.plan +exp=… cluster.gpu=h100"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.help import FAILED, run_command
from megatron_grpo.config.overrides import OPTION
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.proof.plan.page import write_plan
from megatron_grpo.proof.plan.search import search
from megatron_grpo.proof.plan.tables import plan_table, search_table
from megatron_grpo.proof.plan.trace import tracing
from megatron_grpo.proof.plan.whole import profile, submit_plan
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.source import download_config, known_shape

USAGE = """\
python -m megatron_grpo.plan +exp=NAME cluster.gpu=h100 [cluster.nodes=N] [key=value …] [--search]
                               [--json] [--html FILE]

  +exp=NAME      a recipe, and keys of it to change, as for megatron_grpo.train; plan.* are the plan's own
  cluster.gpu=G  a100, h100, h200, b200 or gb200; or plan.hardware=FILE.yaml
  --search       try other layouts on the same GPUs; plan.search_s limits the seconds
  --json         print one JSON object instead of a table
  --html FILE    also write one page with pictures of memory and time

Says whether a run fits, and how long a step takes, from dry runs of its ranks; needs no GPU and no weights, only the
model's config.json. Exit code 1: the run does not fit.
"""
_PRETRAIN = "plan.workload=pretrain"


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return run_command("plan: ", arguments, USAGE, _plan, failures=(RunError,))


def _plan(arguments: Sequence[str]) -> int:
    options, overrides = _options(arguments)
    config, shape = _read(overrides)
    found, layouts = None, None
    with tracing() as pool:
        if options.search:
            layouts = search(config, shape, pool, budget_s=config.plan.search_s)
            found = layouts.best[0].plan if layouts.best else None
        else:
            found = submit_plan(config, shape, pool).result(time.monotonic() + config.plan.timeout_s)
    if options.json:
        shown = found if layouts is None else layouts
        print(json.dumps(None if shown is None else shown.as_dict(), indent=1))
    else:
        print("\n".join([*(search_table(layouts) if layouts else ()), *(plan_table(found) if found else ())]))
    if options.html is not None and found is not None:
        write_plan(options.html, found)
    return 0 if found is not None and not found.problems else FAILED


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


@dataclass(slots=True)
class Options:
    """The options of a command line."""

    search: bool = False
    json: bool = False
    html: Path | None = None
    """File for the page; None: no page is written."""


def _options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """The options, and the arguments that belong to the recipe; ValueError: there is no such option."""
    options, overrides, rest = Options(), [], iter(arguments)
    for word in rest:
        name, _, value = word.partition("=")
        if word in ("--json", "--search"):
            setattr(options, word.removeprefix("--"), True)
        elif name == "--html":
            text = value or next(rest, "")
            if not text:
                raise ValueError("--html needs a file")
            options.html = Path(text)
        elif word.startswith("--") and name != OPTION:
            raise ValueError(f"{word} is no option; there are --search, --json and --html FILE")
        else:
            overrides.append(word)
    return options, overrides


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
