"""Trains the quickstart with every preset and PPO; prints JSON, and fills in tables and curves in docs/algorithms.md.

    python benchmarks/variants.py --runs FOLDER > benchmarks/results/DATE_variants_cpu.json
    python benchmarks/variants.py --runs FOLDER --minibatches 4 > benchmarks/results/DATE_variants_minibatches_cpu.json
    python benchmarks/variants.py --document benchmarks/results/DATE_variants_cpu.json [...]

A run whose summary.json lies in FOLDER already is not repeated, so a benchmark that was stopped can be continued.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from header import header
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.observability.run_files import read_lines

DOCS = Path(__file__).parents[1] / "docs"
BASELINES = {"defaults": ("+exp=quickstart",), "ppo": ("+exp=quickstart_ppo",)}
RUNS = BASELINES | {name: ("+exp=quickstart", f"+variant={name}") for name in list_config_groups()["variant"]}
SMALLER_STEPS = ("policy.optimizer.lr=3e-4", "policy.optimizer.min_lr=3e-5")
ABOUT_THE_RATIO = {name: RUNS[name] for name in ("defaults", "ppo", "cispo", "gspo", "sapo")}
ABOUT_THE_RATIO |= {"sapo, lr 3e-4": (*RUNS["sapo"], *SMALLER_STEPS)}
"""What is worth a comparison when a step has several minibatches, and so ratios other than 1."""
SAMPLES_PER_STEP = 256
"""Of both recipes."""
GOAL = 0.8
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def measure(name: str, recipe: Sequence[str], folder: Path, minibatches: int) -> dict[str, Any]:
    """Train once, if that is not done yet, and read the figures from the run's own files."""
    overrides = [*recipe, *_minibatches(name, minibatches)]
    run_dir = folder / f"{re.sub('[^a-z0-9_]+', '_', name)}_{minibatches}"
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, "-m", "megatron_grpo.train", *overrides, f"run_dir={run_dir}", "checkpointing=none"]
        subprocess.run([*command, "logger.progress=false"], check=True, stdout=sys.stderr)
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = read_lines(run_dir / "metrics.jsonl")
    clipped = [step.get("clip_fraction_low", 0.0) + step.get("clip_fraction_high", 0.0) for step in steps]
    explained = [step["explained_variance"] for step in steps if "explained_variance" in step]
    figures = {
        "name": name,
        "overrides": overrides,
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "curve": {row["step"]: row["val_accuracy"] for row in read_lines(run_dir / "validation.jsonl")},
        "steps": summary["steps"],
        "train_s": round(summary["train_s"], 1),
        "clip_fraction_mean": sum(clipped) / len(clipped),
        "token_mult_prob_error_max": summary["token_mult_prob_error_max"],
    }
    if explained:
        figures["explained_variance"] = {
            "mean": sum(explained) / len(explained),
            "min": min(explained),
            "max": max(explained),
        }
    return figures


def _minibatches(name: str, number: int) -> list[str]:
    models = ("policy", "value") if name == "ppo" else ("policy",)
    samples = SAMPLES_PER_STEP // number
    return [f"{model}.train_global_batch_samples={samples}" for model in models] if number > 1 else []


def write_document(results: Sequence[Path]) -> None:
    """Write the tables and figures of these results into docs/algorithms.md, each between its pair of marks."""
    page = DOCS / "algorithms.md"
    text = page.read_text()
    for path in results:
        result = json.loads(path.read_text())
        name = f"variants_{result['minibatches']}"
        mark = f"<!-- {name} -->"
        figure = f"![held-out accuracy by step](images/{name}.svg)"
        origin = f"Measured {result['date']} on a CPU ({result['machine']})."
        filled = f"{mark}\n{_table(result['runs'])}\n\n{origin}\n\n{figure}\n{mark}"
        text, count = re.subn(f"{mark}.*{mark}", filled.replace("\\", r"\\"), text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{page} needs {mark} exactly twice")
        _draw(result["runs"], DOCS / "images" / f"{name}.svg")
    page.write_text(text)


def _table(runs: Sequence[dict[str, Any]]) -> str:
    steps = list(runs[0]["curve"])
    rows = [["", *(f"step {step}" for step in steps), "clipped"], ["---"] * (len(steps) + 2)]
    for run in runs:
        clipped = f"{100 * run['clip_fraction_mean']:.1f} %"
        rows.append([f"`{run['name']}`", *(f"{run['curve'].get(step, float('nan')):.3f}" for step in steps), clipped])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    style = {"svg.fonttype": "none", "svg.hashsalt": path.stem}  # text as text, and the same file every time
    with matplotlib.rc_context(style):
        FigureCanvasSVG(_figure(runs)).print_svg(str(path), metadata=NO_METADATA)


def _figure(runs: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        steps = [int(step) for step in run["curve"]]
        axes.plot(steps, list(run["curve"].values()), label=run["name"], linewidth=1.6, color=f"C{index}")
    axes.axhline(GOAL, color="#bbbbbb", linewidth=1, linestyle="--")
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", ncols=2)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder for the runs")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps on each step's samples")
    parser.add_argument("--document", type=Path, nargs="+", help="results to put into docs/algorithms.md")
    parser.add_argument("names", nargs="*", help="which of the runs; all by default")
    options = parser.parse_args()
    if options.document:
        write_document(options.document)
        return
    if options.runs is None:
        parser.error("give --runs or --document")
    forms = ABOUT_THE_RATIO if options.minibatches > 1 else RUNS
    names = options.names or list(forms)
    unknown = [name for name in names if name not in forms]
    if unknown:
        parser.error(f"no such run: {', '.join(unknown)}; there is {', '.join(forms)}")
    runs = [measure(name, forms[name], options.runs, options.minibatches) for name in names]
    result = {
        **header("variants"),
        "minibatches": options.minibatches,
        "runs": runs,
    }
    print(json.dumps(result, indent=2))
    short = [f"{run['name']} ({run['accuracy_after']:.3f})" for run in runs if run["accuracy_after"] < GOAL]
    if short and options.minibatches == 1:
        sys.exit(f"below an accuracy of {GOAL}: {', '.join(short)}")


if __name__ == "__main__":
    main()
