"""Plots the figures of a run's algorithm, the mismatch or gradient norm, and the step times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.observability.run_files import VALIDATION_FILE, read_metrics, read_steps, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "curves.png"
SMOOTHING = 0.9  # weight of the past in smoothed curves
PHASE_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
INK, FAINT = "#333333", "#c9d3dd"


def plot_run(run_dir: str | Path, leading_metrics: Sequence[str] = ALGORITHMS["grpo"].leading_metrics) -> Path:
    """Draw metrics.jsonl and validation.jsonl as curves.png in the run's folder.

    `leading_metrics`: those of its algorithm, of steps (`loss`) and of validations (`val_loss`).
    """
    from matplotlib.figure import Figure  # imported only when a run ends

    folder = Path(run_dir)
    steps, validations = read_metrics(folder), read_steps(folder / VALIDATION_FILE)
    # Not through pyplot, which has global state and looks for a display.
    figure = Figure(figsize=(17, 3.8), dpi=130, layout="constrained")
    first, second, third, time = figure.subplots(1, 4)
    names = list(dict.fromkeys(name.removeprefix(VALIDATION_PREFIX) for name in leading_metrics))
    for axes, name in zip((first, second), names, strict=False):
        _draw_metric(axes, name, steps, validations)
    if _select_series(steps, "token_mult_prob_error")[0]:
        _draw_mismatch(third, steps)
    else:
        _draw_metric(third, "grad_norm", steps, [])
    _draw_phases(time, steps)
    time.set_title("Seconds of each step, by phase", fontsize=11, color=INK)
    for axes in (first, second, third, time):
        axes.set_xlabel("step")
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    write_atomically(folder / PLOT_FILE, lambda temporary: figure.savefig(temporary, format="png"))
    return folder / PLOT_FILE


def _draw_metric(axes: Axes, name: str, steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> None:
    x, y = _select_series(steps, name)
    axes.plot(x, y, color=FAINT, linewidth=1, label="each step")
    axes.plot(x, _smooth(y), color=PHASE_COLORS[0], linewidth=2, label="smoothed")
    x_val, y_val = _select_series(validations, VALIDATION_PREFIX + name)
    if x_val:
        axes.plot(x_val, y_val, color=PHASE_COLORS[2], linewidth=2, marker="o", markersize=4, label="held out")
    for x_end, y_end in {(x_val[0], y_val[0]), (x_val[-1], y_val[-1])} if x_val else set():
        axes.annotate(f"{y_end:.2f}", (x_end, y_end), xytext=(0, 7), textcoords="offset points", ha="center")
    if name.endswith("accuracy"):
        axes.set_ylim(0, 1.05)
    if x or x_val:
        axes.legend(frameon=False, loc="best")
    title = name.replace("_", " ").replace("grad norm", "gradient norm")
    axes.set_title(title[0].upper() + title[1:], fontsize=11, color=INK)


def _draw_mismatch(axes: Axes, steps: list[dict[str, Any]]) -> None:
    # The logarithm of the excess over 1 shows healthy steps beside broken ones.
    x, y = _select_series(steps, "token_mult_prob_error")
    excess = [value - 1.0 for value in y]
    axes.plot(x, excess, color=PHASE_COLORS[4], linewidth=1.5)
    if any(value > 0 for value in excess):
        axes.set_yscale("log", nonpositive="mask")
    axes.set_title("Mismatch of training and generation", fontsize=11, color=INK)


def _draw_phases(axes: Axes, steps: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for step in steps for name in step["timing"] if name != "total"))
    x = [step["step"] for step in steps]
    shares = [[step["timing"].get(name, 0.0) for step in steps] for name in names]
    remainder = [max(0.0, step["timing"]["total"] - sum(share[i] for share in shares)) for i, step in enumerate(steps)]
    if x:
        colors = [PHASE_COLORS[i % len(PHASE_COLORS)] for i in range(len(names))]
        axes.stackplot(x, *shares, remainder, labels=[*names, "rest"], colors=[*colors, "#dddddd"], linewidth=0)
        # Slow first steps, in which caches warm up, must not set the scale.
        totals = sorted(step["timing"]["total"] for step in steps)
        axes.set_ylim(0, 1.6 * totals[int(0.95 * (len(totals) - 1))])
        axes.legend(frameon=False, loc="upper right", ncols=2, fontsize=8)


def _select_series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    present = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in present], [row[name] for row in present]


def _smooth(values: list[float]) -> list[float]:
    import pandas as pd

    # The first values have their full weight, as Adam corrects its moments.
    return list(pd.Series(values, dtype=float).ewm(alpha=1 - SMOOTHING).mean())
