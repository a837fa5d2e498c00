"""Seconds of a search for a layout, and of the plan of a recipe as it is, with the CPU seconds of all processes.

    python benchmarks/plan_search.py [dense | experts] > result.json

Needs no GPU and no weights. A search ends when eight layouts fit, or when `plan.search_s` seconds are over.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import psutil
from dry_recipes import model_config
from header import header

CASES = {"dense": ("qwen3_8b_8gpu", 8), "experts": ("qwen3_235b_a22b_32nodes", 32)}
"""Recipe and nodes of 8 GPUs."""


def cpu_s() -> float:
    """CPU seconds of this process and of all that it started."""
    own = psutil.Process()
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))


def measure(recipe: str, nodes: int) -> dict[str, Any]:
    """A search on H100s, within the seconds that a user's search has."""
    from megatron_grpo.config.compose import compose_typed
    from megatron_grpo.models.families import parse_model_shape
    from megatron_grpo.planning.policy_layouts import name_layout
    from megatron_grpo.planning.search import search_layouts
    from megatron_grpo.planning.trace import start_trace_pool

    config = compose_typed([f"+exp={recipe}", f"cluster.nodes={nodes}", "cluster.gpu=h100"]).config
    assert config is not None
    raw = model_config(config.policy.model.path)
    assert raw is not None, "the model is not in tests/data/hf_configs"
    began, used = time.monotonic(), cpu_s()
    with start_trace_pool() as pool:
        found = search_layouts(config, parse_model_shape(raw), pool, budget_s=config.plan.search_s)
        seconds = cpu_s() - used
    layouts = [
        {
            "layout": name_layout(one.candidate.config),
            "estimated_s": round(one.candidate.estimated_s, 1),
            "step_s": None if one.plan is None or one.plan.times is None else round(one.plan.times.step_s, 1),
            "peak_gib": None if one.plan is None else round(one.plan.fullest.peak / 2**30, 1),
            "reason": one.reason,
        }
        for one in (*found.best, *found.failed)
    ]
    counts = {"legal": found.legal, "too_large": found.too_large, "left": found.skipped}
    wall = {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(seconds, 1), "load": os.getloadavg()}
    return {"recipe": recipe, "gpus": 8 * nodes, **wall, **counts, "layouts": layouts}


def main() -> None:
    """Print the searches of the cases on the command line, or of all."""
    names = sys.argv[1:] or list(CASES)
    print(json.dumps({**header("plan_search"), "results": [measure(*CASES[name]) for name in names]}, indent=1))


if __name__ == "__main__":
    main()
