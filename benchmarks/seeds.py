"""Trains recipes with several seeds each and compares the held-out accuracy that they reach; prints JSON.

    python benchmarks/seeds.py [--recipes quickstart quickstart_async] [--seeds 1 2 3] [--folder DIR] [override ...]

`final` is the accuracy after the last step by recipe and seed, `mean` and `spread` (standard deviation of a seed) its
summary by recipe, and `difference` the first recipe's mean minus each one's, with `noise`: the standard error of that
difference. `prepared` are the accuracies of the models that a run begins from, its teacher's too. With --folder runs
are kept there, and one that was made before is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from header import header
from small_model import run


def is_complete(run_dir: Path) -> bool:
    """Whether a run has come to its end in this folder."""
    summary = run_dir / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["outcome"] == "completed"


def curve(folder: Path, recipe: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Held-out accuracy by step, and seconds of all steps, of one run."""
    run_dir = folder / f"{recipe}_{seed}"
    if not is_complete(run_dir):
        command = [sys.executable, "-m", "megatron_grpo.train", f"+exp={recipe}", f"grpo.seed={seed}"]
        run([*command, f"run_dir={run_dir}", "logger.progress=false", *overrides])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    prepared = Path(yaml.safe_load((run_dir / "config.yaml").read_text())["prepare"]["folder"], "recipe.json")
    return {
        "prepared": json.loads(prepared.read_text())["accuracy"],
        "accuracy": {row["step"]: round(row["val_accuracy"], 4) for row in rows if "val_accuracy" in row},
        "seconds": round(sum(row["timing"]["total"] for row in rows), 1),
    }


def compare(recipes: list[str], seeds: list[int], folder: Path, overrides: list[str]) -> dict[str, Any]:
    """All recipes with all seeds, one run at a time."""
    runs = {recipe: {seed: curve(folder, recipe, seed, overrides) for seed in seeds} for recipe in recipes}
    final = {
        recipe: {seed: list(results["accuracy"].values())[-1] for seed, results in results_by_seed.items()}
        for recipe, results_by_seed in runs.items()
    }
    mean = {recipe: statistics.fmean(results_by_seed.values()) for recipe, results_by_seed in final.items()}
    spread = {recipe: statistics.stdev(results_by_seed.values()) for recipe, results_by_seed in final.items()}
    first = recipes[0]
    return {
        "final": final,
        "mean": mean,
        "spread": spread,
        "difference": {other_recipe: mean[first] - mean[other_recipe] for other_recipe in recipes[1:]},
        "noise": {
            other_recipe: math.sqrt((spread[first] ** 2 + spread[other_recipe] ** 2) / len(seeds))
            for other_recipe in recipes[1:]
        },
        "runs": runs,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["quickstart", "quickstart_async"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if len(options.seeds) < 2:
        parser.error("--seeds: a spread needs two seeds or more")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
        folder = (options.folder or Path(path)).absolute()
        print(
            json.dumps(
                {**header("seeds"), **compare(options.recipes, options.seeds, folder, options.overrides)}, indent=2
            )
        )
