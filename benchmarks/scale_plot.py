"""Draws the picture of docs/plan.md from a result of scale.py.

    python benchmarks/scale_plot.py benchmarks/results/2026-11-25_scale_cpu.json docs/images/scale.png

Left, what a step costs the driver and Ray in CPU seconds; right, the driver's memory; both by the number of GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

LIMIT_S, LIMIT_GIB = 3.0, 8.0
MAIN = "main"
"""The name of the driver's main thread in the result."""


def main() -> None:
    result, picture = map(Path, sys.argv[1:])
    results = json.loads(result.read_text())["results"]
    sizes = sorted(
        (row for row in results if row["fault"] == "none" and row["mode"] == "separate"), key=lambda row: row["gpus"]
    )
    figure, (seconds, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    gpus = [row["gpus"] for row in sizes]
    _plot_lines(
        seconds,
        gpus,
        {
            "driver, all threads": [row["driver_cpu_s"] for row in sizes],
            "driver, main thread": [row["driver_threads_cpu_s"][MAIN] for row in sizes],
            "Ray: raylet and GCS": [_of_ray(row) for row in sizes],
        },
    )
    _finish(seconds, gpus, LIMIT_S, "CPU seconds of a step")
    _plot_lines(memory, gpus, {"driver, peak": [row["driver_peak_gib"] for row in sizes]})
    _finish(memory, gpus, LIMIT_GIB, "resident memory, GiB")
    figure.savefig(picture, dpi=120)


def _of_ray(row: dict[str, Any]) -> float:
    used = row["other_processes_cpu_s"]
    return float(used.get("raylet", 0.0) + used.get("gcs_server", 0.0))


def _plot_lines(axes: Any, gpus: list[int], values: dict[str, list[float]]) -> None:
    for name, line in values.items():
        axes.plot(gpus, line, marker="o", label=name)


def _finish(axes: Any, gpus: list[int], limit: float, label: str) -> None:
    axes.axhline(limit, color="grey", linestyle="--", linewidth=1, label="goal: no more than this")
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("simulated GPUs")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
