"""Trains presets on samples of older weights and compares the held-out accuracy that they reach; prints JSON.

    python benchmarks/lags.py [--variants defaults cispo ...] [--lags 0 1 4 16] [--seeds 1 2 3] [--task easy hard]
        [--folder DIR] [override ...]

Staleness is where presets differ: with lag n a step trains on samples that weights of n steps before drew, once n steps
have passed (grpo.async_grpo.max_trajectory_age_steps; `age` is what was measured). In the hard task, at a temperature
of 1.5 and with four samples of a prompt, most groups have no success at first. `interval` has the mean over seeds with
95 %, by Student's distribution; it needs two seeds or more. With --folder runs are kept there, and one that was made
before is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from header import header
from scipy.stats import t as student
from seeds import is_complete
from small_model import run

from megatron_grpo.observability.run_files import read_lines

TASKS = {"easy": (), "hard": ("generation.temperature=1.5", "grpo.num_generations_per_prompt=4")}
CORRECTION = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2",
)


def train(variant: str, lag: int, task: str, seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Final accuracy, and mean age of samples, of one run."""
    run_dir = folder / f"{task}_{variant}_{lag}_{seed}"
    if not is_complete(run_dir):
        ahead = (*CORRECTION, "grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={lag}")
        preset = () if variant == "defaults" else (f"+variant={variant}",)
        settings = [*preset, *TASKS[task], *(ahead if lag else ()), f"grpo.seed={seed}", f"run_dir={run_dir}"]
        command = [sys.executable, "-m", "megatron_grpo.train", "+exp=quickstart", "checkpointing=none"]
        run([*command, *settings, "logger.progress=false", *overrides])
    steps = read_lines(run_dir / "metrics.jsonl")
    accuracy = [row["val_accuracy"] for row in read_lines(run_dir / "validation.jsonl")]
    return {"accuracy": accuracy[-1], "age": statistics.fmean(step.get("trajectory_age", 0.0) for step in steps)}


def summarize(results: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Mean and interval over seeds."""
    values = [result["accuracy"] for result in results]
    figures: dict[str, Any] = {
        "accuracies": values,
        "mean": statistics.fmean(values),
        "age": statistics.fmean(result["age"] for result in results),
    }
    if len(values) > 1:
        half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        figures["interval"] = [figures["mean"] - half, figures["mean"] + half]
    return figures


def compare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All variants at all lags on all tasks, one run at a time."""
    return [
        {
            "variant": variant,
            "lag": lag,
            "task": task,
            **summarize([train(variant, lag, task, seed, folder, options.overrides) for seed in options.seeds]),
        }
        for task in options.task
        for variant in options.variants
        for lag in options.lags
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["defaults", "cispo", "gspo", "sapo"])
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4, 16])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        folder = (options.folder or Path(path)).absolute()
        rows = compare(options, folder)
    print(
        json.dumps({**header("lags"), "seeds": options.seeds, "overrides": options.overrides, "runs": rows}, indent=2)
    )
