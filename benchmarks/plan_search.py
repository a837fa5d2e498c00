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
    process = psutil.Process()
    times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
    return float(sum(member.user + member.system + member.children_user + member.children_system for member in times))


def measure(recipe: str, nodes: int) -> dict[str, Any]:
    """A search on H100s, within the seconds that a user's search has."""
    from megatron_grpo.config.compose import compose_typed
    from megatron_grpo.models.families.reading import parse_model_shape
    from megatron_grpo.planning.policy_layouts import name_layout
    from megatron_grpo.planning.search import search_layouts
    from megatron_grpo.planning.trace import start_trace_pool

    config = compose_typed([f"+exp={recipe}", f"cluster.nodes={nodes}", "cluster.gpu=h100"]).config
    assert config is not None
    raw = model_config(config.policy.model.path)
    assert raw is not None, "the model is not in tests/data/hf_configs"
    began, used = time.monotonic(), cpu_s()
    with start_trace_pool() as pool:
        search = search_layouts(config, parse_model_shape(raw), pool, budget_s=config.plan.search_s)
        seconds = cpu_s() - used
    layouts = [
        {
            "layout": name_layout(layout.candidate.config),
            "estimated_s": round(layout.candidate.estimated_s, 1),
            "step_s": None if layout.plan is None or layout.plan.times is None else round(layout.plan.times.step_s, 1),
            "peak_gib": None if layout.plan is None else round(layout.plan.fullest.peak / 2**30, 1),
            "reason": layout.reason,
        }
        for layout in (*search.best, *search.failed)
    ]
    counts = {"legal": search.legal, "too_large": search.too_large, "left": search.skipped}
    wall = {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(seconds, 1), "load": os.getloadavg()}
    return {"recipe": recipe, "gpus": 8 * nodes, **wall, **counts, "layouts": layouts}


def main() -> None:
    """Print the searches of the cases on the command line, or of all."""
    names = sys.argv[1:] or list(CASES)
    print(json.dumps({**header("plan_search"), "results": [measure(*CASES[name]) for name in names]}, indent=1))


if __name__ == "__main__":
    main()
