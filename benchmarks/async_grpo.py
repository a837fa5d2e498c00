"""Compares asynchronous GRPO with the loop that samples and trains in turn, on long-tailed lengths; prints JSON.

    python benchmarks/async_grpo.py [--steps 20] [--rounds 1] [--sides age_1 age_2_oversampling_1.5] [override ...]

A small model with random weights is asked for responses, each token of which ends it with nearly the same probability:
lengths are geometric, and the longest of a step is many times the mean. The weights hardly move, so that all sides
sample such lengths to the end. Sides take turns, a process of its own each. `samples_per_s` is that of all steps but
the first ones; `ratio` is a side over the loop in turn, median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from header import header
from small_model import make_model, run, settings_of_a_run, steps_of_a_run

WARM_UP_STEPS = 4
IN_TURN = "in_turn"
WORDS, TOKENS, PROMPTS = 32, 240, 32
CORRECTION = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2",
)


def measure(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """One run of a side."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_model(folder / "model", WORDS, hidden=128, layers=2)
        settings = settings_of_a_run(folder, words=WORDS, tokens=TOKENS, prompts_per_step=PROMPTS, steps=steps)
        run([sys.executable, "-m", "megatron_grpo.train", *settings, *CORRECTION, *overrides])
        rows = steps_of_a_run(folder, WARM_UP_STEPS)
    samples = sum(row["throughput"]["samples_per_s"] * row["timing"]["total"] for row in rows)
    seconds = sum(row["timing"]["total"] for row in rows)
    named = ("response_length", "response_length_p50", "response_length_p99", "response_length_max")
    of_async = (
        "exposed_generation_s",
        "trajectory_age",
        "trajectory_age_max",
        "trajectory_versions",
        "oversampling_left_over",
        "oversampling_resumed",
    )
    phases = sorted({name for row in rows for name in row["timing"]})
    return {
        "samples_per_s": samples / seconds,
        "loadavg_before": load,
        **{name: statistics.fmean(row[name] for row in rows) for name in named},
        **{name: statistics.fmean(row[name] for row in rows) for name in of_async if name in rows[0]},
        "timing": {name: statistics.fmean(row["timing"].get(name, 0.0) for row in rows) for name in phases},
    }


def options_of(side: str) -> list[str]:
    """What a side adds: `age_A`, `age_A_oversampling_F`, or nothing for the loop in turn."""
    if side == IN_TURN:
        return []
    age, _, factor = side.removeprefix("age_").partition("_oversampling_")
    options = ["grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={age}"]
    return options + ([f"grpo.async_grpo.oversampling_factor={factor}"] if factor else [])


def compare(steps: int, rounds: int, chosen: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """All sides, in turn."""
    sides = {side: [*overrides, *options_of(side)] for side in (IN_TURN, *chosen)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side_overrides in sides.items():
            runs[name].append(measure(side_overrides, steps))
    ratios = {
        name: statistics.median(
            first_result["samples_per_s"] / second_result["samples_per_s"]
            for first_result, second_result in zip(results, runs[IN_TURN], strict=True)
        )
        for name, results in runs.items()
        if name != IN_TURN
    }
    return {**header("async_grpo"), "steps": steps, "overrides": list(overrides), "ratio": ratios, "runs": runs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", default=["age_1", "age_2_oversampling_1.5"])
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.steps, arguments.rounds, arguments.sides, arguments.overrides), indent=2))
