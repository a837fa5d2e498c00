"""Compares asynchronous GRPO with the loop that samples and trains in turn, on long-tailed lengths; prints JSON.

    python benchmarks/async_grpo.py [--steps 20] [--rounds 1] [--ages 1] [override ...]

The quickstart's model is asked for sums at a temperature at which it hardly knows them: every token ends a response
with nearly equal probability, so lengths are geometric, and the longest of a step is many times the mean. The weights
hardly move, so that both sides sample such lengths to the end. Sides take turns, a process of its own each.
`samples_per_s` is that of all steps but the first ones; `ratio` is a side over the loop in turn, median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from header import header

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 4
IN_TURN = "in_turn"
WORKLOAD = (
    "checkpointing=none",
    "logger.progress=false",
    "logger.rollouts=off",
    "logger.tensorboard=false",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "generation.max_new_tokens=240",
    "generation.temperature=4",
    "generation.parallel.pipeline=1",
    "policy.parallel.pipeline=1",
    "policy.max_total_sequence_length=256",
    "policy.microbatch_tokens=2048",
    "policy.optimizer.lr=1e-9",
    "policy.optimizer.min_lr=1e-9",
)
CORRECTION = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2",
)


def measure(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """One run of a side."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        given = [*WORKLOAD, *CORRECTION, f"grpo.max_num_steps={steps}", f"run_dir={run_dir}", *overrides]
        command = [sys.executable, "-m", "megatron_grpo.train", "+exp=quickstart", *given]
        load = os.getloadavg()[0]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stdout}\n{done.stderr}")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][WARM_UP_STEPS:]
    samples = sum(row["throughput"]["samples_per_s"] * row["timing"]["total"] for row in rows)
    seconds = sum(row["timing"]["total"] for row in rows)
    named = ("response_length", "response_length_p50", "response_length_p99", "response_length_max")
    of_async = ("exposed_generation_s", "trajectory_age", "trajectory_age_max", "trajectory_versions")
    phases = sorted({name for row in rows for name in row["timing"]})
    return {
        "samples_per_s": samples / seconds,
        "loadavg_before": load,
        **{name: statistics.fmean(row[name] for row in rows) for name in named},
        **{name: statistics.fmean(row[name] for row in rows) for name in of_async if name in rows[0]},
        "timing": {name: statistics.fmean(row["timing"].get(name, 0.0) for row in rows) for name in phases},
    }


def compare(steps: int, rounds: int, ages: Sequence[int], overrides: Sequence[str]) -> dict[str, Any]:
    """All sides, in turn."""
    sides = {IN_TURN: list(overrides)}
    for age in ages:
        options = ["grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={age}"]
        sides[f"age_{age}"] = [*overrides, *options]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, given in sides.items():
            runs[name].append(measure(given, steps))
    ratios = {
        name: statistics.median(
            one["samples_per_s"] / other["samples_per_s"] for one, other in zip(found, runs[IN_TURN], strict=True)
        )
        for name, found in runs.items()
        if name != IN_TURN
    }
    return {**header("async_grpo"), "steps": steps, "overrides": list(overrides), "ratio": ratios, "runs": runs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ages", type=int, nargs="+", default=[1])
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.steps, arguments.rounds, arguments.ages, arguments.overrides), indent=2))
