"""Compares methods on samples of older weights, with three seeds, and prints JSON; fills in docs/algorithms.md.

    python benchmarks/lags.py --folder DIR [--methods clipped dppo ...] [--lags 0 1 4 16] [--seeds 1 2 3]
        [--tasks quickstart hard] [override ...]
    python benchmarks/lags.py --document benchmarks/results/DATE_lags_cpu.json

Staleness is where methods differ: with lag n a step trains on samples that weights of n steps before drew
(stale_learner.py). The task `quickstart` is that of the recipe, in all lags. In `hard`, with lag 4, a mixture of
experts answers at temperature 1.8 in up to 24 tokens, most groups of four have no success at first, and its engine
computes in bfloat16. A step has two optimizer steps, so that ratios differ from 1. Results lie in the folder; a run
that was made before is not made again. `interval` has the mean over seeds with 95 %, by Student's distribution.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from header import header
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from scipy.stats import t as student
from stale_learner import LaggedRun, train

DOCS = Path(__file__).parents[1] / "docs"
CORRECTION = ("loss_fn.corrections=[tis]", "loss_fn.truncated_importance_sampling_ratio=2")
METHODS = {
    "clipped": (),
    "clipped, tis": CORRECTION,
    "dppo": ("+variant=dppo",),
    "cispo, tis": ("+variant=cispo", *CORRECTION),
    "gspo, tis": ("+variant=gspo", *CORRECTION),
    "off_policy_mask": ("+variant=off_policy_mask",),
    "dro": ("+variant=dro",),
    "vespo": ("+variant=vespo",),
    "maxrl, tis": ("+variant=maxrl", *CORRECTION),
}
STEP = (
    "grpo.num_prompts_per_step=8",
    "policy.train_global_batch_samples=32",
    "policy.optimizer.lr=5e-4",
    "grpo.max_num_steps=40",
)


@dataclass(frozen=True)
class Task:
    """A task with the precision of its engine, and the lags that it is made with."""

    overrides: tuple[str, ...]
    engine_dtype: str
    lags: tuple[int, ...] | None
    """None: those of the command line."""


TASKS = {
    "quickstart": Task(("+exp=quickstart", "policy.parallel.pipeline=1", *STEP), "float32", None),
    "hard": Task(
        (
            "+exp=quickstart_moe",
            "policy.parallel.data=1",
            "policy.parallel.expert=1",
            "generation.temperature=1.8",
            "data.max_input_seq_length=8",
            "generation.max_new_tokens=24",
            *STEP,
            "grpo.max_num_steps=20",
            "grpo.num_prompts_per_step=16",
            "grpo.num_generations_per_prompt=4",
        ),
        "bfloat16",
        (4,),
    ),
}


def locate_result(task: str, method: str, lag: int, seed: int, options: argparse.Namespace) -> Path:
    """Locate the file of a run's result."""
    file: Path = options.folder / f"{task}_{re.sub('[^a-z_]+', '_', method)}_{lag}_{seed}.json"
    return file


def measure(task: str, method: str, lag: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Make a run, unless its result lies in the folder."""
    file = locate_result(task, method, lag, seed, options)
    if not file.exists():
        overrides = (*TASKS[task].overrides, *METHODS[method], *options.overrides)
        run = LaggedRun(overrides=overrides, lag=lag, seed=seed, engine_dtype=TASKS[task].engine_dtype)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(train(run)))
        partial.rename(file)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def summarize(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean accuracy over seeds with its interval."""
    values = [result["accuracy"] for result in results]
    figures: dict[str, Any] = {"accuracies": [round(value, 4) for value in values], "mean": statistics.fmean(values)}
    if len(values) > 1:
        half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        figures["interval"] = [figures["mean"] - half, figures["mean"] + half]
    return figures | {"runs": [{name: figure for name, figure in run.items() if name != "accuracy"} for run in results]}


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All methods in all lags of all tasks; with `made` only those whose runs are all in the folder."""
    rows = []
    for task in options.tasks:
        for lag in TASKS[task].lags or options.lags:
            for method in options.methods:
                files = [locate_result(task, method, lag, seed, options) for seed in options.seeds]
                if options.made and not all(file.exists() for file in files):
                    continue
                results = [measure(task, method, lag, seed, options) for seed in options.seeds]
                rows.append({"task": task, "method": method, "lag": lag, **summarize(results)})
    return rows


def write_document(path: Path) -> None:
    """Write the table and the figure of a result into docs/algorithms.md, between its pair of marks."""
    page, result, mark = DOCS / "algorithms.md", json.loads(path.read_text()), "<!-- lags -->"
    origin = f"Measured {result['date']} on a CPU ({result['machine']})."
    figure = "![held-out accuracy by lag](images/lags.svg)"
    filled = f"{mark}\n{_write_table(result['runs'])}\n\n{origin}\n\n{figure}\n{mark}"
    text, count = re.subn(f"{mark}.*{mark}", filled.replace("\\", r"\\"), page.read_text(), flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page} needs {mark} exactly twice")
    page.write_text(text)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lags"}):  # the same file every time
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(_draw(result["runs"])).print_svg(str(DOCS / "images" / "lags.svg"), metadata=metadata)


def _write_table(runs: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys((run["task"], run["lag"]) for run in runs))
    rows = [["", *(f"{task}, lag {lag}" for task, lag in columns)], ["---"] * (len(columns) + 1)]
    cells = {(run["method"], run["task"], run["lag"]): _write_cell(run) for run in runs}
    methods = dict.fromkeys(run["method"] for run in runs)
    rows += [[f"`{method}`", *(cells.get((method, *column), "not run") for column in columns)] for method in methods]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _write_cell(run: dict[str, Any]) -> str:
    return f"{run['mean']:.2f} ± {run['interval'][1] - run['mean']:.2f}"


def _draw(runs: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    runs_of_task = [run for run in runs if run["task"] == "quickstart"]
    methods, lags = (
        list(dict.fromkeys(run["method"] for run in runs_of_task)),
        sorted({run["lag"] for run in runs_of_task}),
    )
    for index, method in enumerate(methods):
        line = sorted((run for run in runs_of_task if run["method"] == method), key=lambda run: run["lag"])
        positions = [lags.index(run["lag"]) + 0.06 * (index - len(methods) / 2) for run in line]
        halves = [run["interval"][1] - run["mean"] for run in line]
        axes.errorbar(positions, [run["mean"] for run in line], halves, label=method, color=f"C{index}", linewidth=1.4)
    axes.set(xlabel="lag in steps", ylabel="held-out accuracy", ylim=(0, 1))
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", ncols=2)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4, 16])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--folder", type=Path, help="folder for the results of runs")
    parser.add_argument("--made", action="store_true", help="summarise the runs that were made, and make none")
    parser.add_argument("--document", type=Path, help="result to put into docs/algorithms.md")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.document:
        write_document(options.document)
        return
    if options.folder is None:
        parser.error("give --folder or --document")
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    tasks = {name: {"overrides": TASKS[name].overrides, "engine": TASKS[name].engine_dtype} for name in options.tasks}
    methods = {name: METHODS[name] for name in options.methods}
    result = {**header("lags"), "seeds": options.seeds, "tasks": tasks, "methods": methods}
    print(json.dumps({**result, "overrides": options.overrides, "runs": compare(options)}, indent=1))


if __name__ == "__main__":
    main()
