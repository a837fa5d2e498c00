"""One screen of a run for a terminal, drawn again every two seconds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_grpo.config.outside_text import format_record
from megatron_grpo.observability.live.followed_run import FollowedRun, read_outcome
from megatron_grpo.observability.live.lanes import choose_order, find_last_time, make_lanes, read_spans
from megatron_grpo.observability.live.series import METRICS
from megatron_grpo.observability.progress import ETA_STEPS, PROGRESS_METRICS, format_duration
from megatron_grpo.observability.run_files import TOTAL

REFRESH_S = 2.0
WINDOW_S = 60.0  # of the shares of processes
CURVE_POINTS, MOST_PROCESSES, SHOWN_ALARMS = 40, 16, 5
_BARS = "▁▂▃▄▅▆▇█"


def show_screen(runs: Sequence[FollowedRun], console: Console | None = None, *, once: bool = False) -> None:
    """Draw the runs until they end; `once`: a single time."""
    console = console or Console(highlight=False)
    if once or not console.is_terminal:
        console.print(draw_runs(runs))
        return
    with Live(draw_runs(runs), console=console, screen=True, auto_refresh=False) as live:
        while any(run.describe()["is_live"] for run in runs):
            time.sleep(REFRESH_S)
            live.update(draw_runs(runs), refresh=True)
    console.print(draw_runs(runs))


def draw_runs(runs: Sequence[FollowedRun]) -> RenderableType:
    """Draw head, figures, processes and alarms of each run."""
    parts: list[RenderableType] = []
    for run in runs:
        run.refresh()
        description = run.describe()
        parts += [_draw_head(run, description), _draw_figures(run), _draw_processes(run)]
        parts += _draw_alarms(description["alarms"])
    return Group(*parts)


def _draw_head(run: FollowedRun, description: dict[str, Any]) -> Text:
    outcome = "running" if description["is_live"] else read_outcome(run.folder).get("outcome", "no end recorded")
    settings = {key: value for key, value, _ in description["config"]}
    step = run.steps.steps[-1] if run.steps.steps else 0
    last = next((value for key, value in settings.items() if key.endswith(".max_num_steps")), "?")
    recent = run.steps.read_last("timing", TOTAL, ETA_STEPS)
    remaining = ""
    if recent and str(last).isdigit() and description["is_live"]:
        remaining = f"  {median(recent):.2f} s a step, ETA {format_duration(median(recent) * (int(last) - step))}"
    text = Text(_clean(description["name"]), style="bold")
    text.append(f"  {_clean(str(outcome))}  step {step}/{_clean(str(last))}{remaining}", style="not bold")
    return text


def _draw_figures(run: FollowedRun) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = [(METRICS, name, label) for name, label, _ in PROGRESS_METRICS]
    rows += [("throughput", name, label) for name, label in _OPERATION.items()]
    for group, name, label in rows:
        values = run.steps.read_last(group, name, 400)
        if values:
            table.add_row(label, f"{values[-1]:.4g}", Text(draw_curve(values), style="cyan"))
    held_out = run.validations.read_last(METRICS, "val_accuracy", 400)
    if held_out:
        table.add_row("held-out accuracy", f"{held_out[-1]:.4g}", Text(draw_curve(held_out), style="green"))
    return table


_OPERATION = {
    "tokens_per_s": "tokens/s",
    "engine_waiting": "queue",
    "engine_prefix_hit_rate": "cache hits",
    "gpu_memory_gib": "GPU GiB",
}


def draw_curve(values: Sequence[float], points: int = CURVE_POINTS) -> str:
    """Draw means of equal parts of the values as bars of eight heights."""
    points = min(points, len(values))
    bounds = [len(values) * point // points for point in range(points + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _draw_processes(run: FollowedRun) -> RenderableType:
    end = find_last_time(run.folder)
    spans = read_spans(run.folder, end - WINDOW_S, end)
    if not spans:
        return Text("")
    lanes = make_lanes(spans, end - WINDOW_S, end)
    shares = {lane["name"]: lane["shares"] for lane in lanes["lanes"]}
    table = Table.grid(padding=(0, 2))
    for name in choose_order(shares)[:MOST_PROCESSES]:
        parts = ", ".join(f"{phase} {share:.0%}" for phase, share in list(shares[name].items())[:4])
        table.add_row(_clean(name), _clean(parts))
    overlap = "  ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in lanes["shares"].items())
    return Group(Text(f"last {WINDOW_S:.0f} s  {overlap}", style="bold"), table)


def _draw_alarms(alarms: Sequence[dict[str, Any]]) -> list[RenderableType]:
    return [
        Text(_clean(f"alarm {alarm['name']} in step {alarm['step']}: {alarm['text']}"), style="red")
        for alarm in alarms[-SHOWN_ALARMS:]
    ]


def _clean(text: str) -> str:
    return format_record(text)  # a name or text of a run may steer the terminal
