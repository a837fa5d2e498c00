"""Draws held-out accuracy by step of runs: python docs/tutorial_picture.py RUN_DIR ... writes images/tutorial.svg."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

PICTURE = Path(__file__).with_name("images") / "tutorial.svg"


def draw(run_dirs: list[Path], file: Path) -> None:
    """Draw a line for each run, with its last value."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for run_dir in run_dirs:
        rows = [json.loads(line) for line in (run_dir / "validation.jsonl").read_text().splitlines()]
        steps, values = [row["step"] for row in rows], [row["val_accuracy"] for row in rows]
        axes.plot(steps, values, marker="o", markersize=4, label=run_dir.name)
        axes.annotate(f"{values[-1]:.2f}", (steps[-1], values[-1]), xytext=(5, -3), textcoords="offset points")
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1.05))
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    # Text as text, and the same file every time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tutorial"}):
        FigureCanvasSVG(figure).print_svg(str(file), metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw([Path(argument) for argument in sys.argv[1:]], PICTURE)
