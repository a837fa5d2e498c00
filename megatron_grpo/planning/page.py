"""The page of a plan: memory of each distinct rank by phase, and the timeline of a step, in one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from megatron_grpo.observability.page.write import STYLE, render_page
from megatron_grpo.observability.run_files import write_text
from megatron_grpo.planning.device_memory import GIB, STATIC, RankMemory
from megatron_grpo.planning.step import StepTimes
from megatron_grpo.planning.whole import Plan

KINDS = (*STATIC, "other tensors", "reserve")
"""Parts of a bar of memory, in their order."""
# Numbers of colours in the report's style.
_COLOURS = {"weights": 1, "gradients": 2, "optimizer": 3, "FP8 weights": 4, "other tensors": 5, "reserve": 9}
_PHASES = {"generation": 1, "logprobs": 2, "reference": 4, "train": 3, "optimizer": 5, "refit": 6, "train_value": 8}
_LEFT, _WIDTH, _RIGHT, _ROW = 110, 700, 90, 22
"""Pixels of labels, of the longest bar, of the figures behind bars, and of a row."""
_OWN_STYLE = "svg text { font: 12px var(--sans); fill: var(--ink); } .limit { stroke: var(--bad); } "
_OWN_STYLE += "h3 { font-size: 13.5px; margin: 12px 0 4px; } ul { padding-left: 20px; } " + " ".join(
    f".p{number} {{ fill: var(--p{number}); }}" for number in range(1, 10)
)


def write_page(file: Path, plan: Plan) -> None:
    """Write the page; OSError: the file cannot be written."""
    style = resources.files("megatron_grpo.observability.page").joinpath("assets", STYLE).read_text(encoding="utf-8")
    write_text(file, render_page(style + _OWN_STYLE, "", "\n".join(_render_body(plan)), [], title="Plan"))


def _render_body(plan: Plan) -> Iterator[str]:
    outcome = "failed" if plan.problems else "completed"
    yield f'<h1>{escape(plan.config.name)} <span class="outcome {outcome}">{escape(plan.verdict)}</span></h1>'
    yield from (f'<p class="reason">{escape(problem)}</p>' for problem in plan.problems)
    yield '<dl class="tiles">'
    yield from (f'<div class="tile"><dt>{name}</dt><dd>{value}</dd></div>' for name, value in _render_figures(plan))
    yield "</dl>"
    yield "<h2>Memory by phase</h2>"
    legend = _render_legend({name: _COLOURS[name] for name in KINDS})
    yield f'<p class="note">{legend}; the line is the GPU\'s memory.</p>'
    for rank in plan.all_ranks:
        skew = f", experts at {rank.expert_skew:g} times the mean" if rank.expert_skew > 1 else ""
        of = "" if rank.model == "policy" else f" of the {rank.model}"
        yield f"<h3>Stage {rank.stage}{of}, {rank.layers} layers{skew}</h3>"
        yield draw_memory_bars(rank, plan.hardware.memory_gib)
    if plan.times is not None:
        yield "<h2>A step</h2>"
        yield draw_timeline(plan.times)
        yield "<h2>An optimizer step, by pipeline stage</h2>"
        yield draw_stage_bars(plan.times)
    yield "<h2>Assumptions</h2><ul>"
    yield from (f"<li>{escape(assumption)}</li>" for assumption in plan.assumptions)
    yield "</ul>"


def _render_figures(plan: Plan) -> Iterator[tuple[str, str]]:
    idle = f"; {plan.idle} idle" if plan.idle else ""
    yield "GPUs in use", f"{plan.gpus - plan.idle} <small>of {plan.gpus}{idle}</small>"
    yield "fullest GPU", f"{plan.fullest.peak / GIB:.1f} <small>of {plan.hardware.memory_gib:g} GiB</small>"
    if plan.times is not None:
        yield "step", f"{plan.times.step_s:.1f} <small>s</small>"
        yield "tokens per second and GPU", f"{plan.times.tokens_per_s_per_gpu:,.0f}"
        if "refit" in plan.times.phase_s:
            yield "refit", f"{plan.times.refit_s:.2f} <small>s</small>"


def _render_legend(colours: dict[str, int]) -> str:
    square = '<svg width="12" height="12"><rect class="p{}" width="12" height="12"/></svg> {}'
    return ", ".join(square.format(number, escape(name)) for name, number in colours.items())


def draw_memory_bars(rank: RankMemory, memory_gib: float) -> str:
    """Draw a bar for each phase, and the GPU's memory."""
    scale = _WIDTH / max(memory_gib * GIB, rank.peak)
    rows = []
    for name, parts in rank.parts.items():
        sizes = {**parts, "reserve": rank.reserve}
        present = [(kind, sizes[kind]) for kind in KINDS if kind in sizes]
        cells = [(size * scale, _COLOURS[kind], f"{kind}: {size / GIB:.2f} GiB") for kind, size in present]
        rows.append((name, cells, f"{(rank.phases[name] + rank.reserve) / GIB:.1f} GiB"))
    at = _LEFT + memory_gib * GIB * scale
    line = f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{len(rows) * _ROW}"/>'
    return _wrap_drawing(rows, line)


def draw_timeline(times: StepTimes) -> str:
    """Draw the phases in turn, and generation beside them if it is."""
    scale = _WIDTH / max(times.step_s, times.phase_s.get("generation", 0.0), 1e-9)
    rows, clock = [], 0.0
    for name, seconds in times.phase_s.items():
        is_beside = times.samples_beside and name == "generation"
        begin = 0.0 if is_beside else clock
        clock = 0.0 if is_beside else clock + seconds
        cells = [(begin * scale, 0, ""), (seconds * scale, _PHASES.get(name, 7), f"{name}: {seconds:.2f} s")]
        rows.append((name, cells, f"{seconds:.1f} s"))
    return _wrap_drawing(rows)


def draw_stage_bars(times: StepTimes) -> str:
    """Draw how long each pipeline stage computes; the rest is its bubble."""
    scale = _WIDTH / max(times.train.seconds, 1e-9)
    rows = []
    for stage, busy in enumerate(times.train.busy):
        idle = times.train.seconds - busy
        cells = [(busy * scale, 3, f"computes {busy:.2f} s"), (idle * scale, 9, f"waits {idle:.2f} s")]
        rows.append((f"stage {stage}", cells, f"{idle / max(times.train.seconds, 1e-9):.0%} idle"))
    return _wrap_drawing(rows)


def _wrap_drawing(rows: Sequence[tuple[str, list[tuple[float, int, str]], str]], extra: str = "") -> str:
    """Draw rows of bars: (label, [(width, colour; 0: a gap, tooltip)], figure)."""
    elements = []
    for number, (label, cells, figure) in enumerate(rows):
        top, x = number * _ROW, float(_LEFT)
        elements.append(f'<text x="0" y="{top + 15}">{escape(label)}</text>')
        for width, colour, tip in cells:
            if colour and width > 0:
                elements.append(
                    f'<rect class="p{colour}" x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="{_ROW - 5}">'
                    f"<title>{escape(tip)}</title></rect>"
                )
            x += width
        elements.append(f'<text x="{x + 6:.1f}" y="{top + 15}">{escape(figure)}</text>')
    width, height = _LEFT + _WIDTH + _RIGHT, len(rows) * _ROW
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img">{"".join(elements)}{extra}</svg>'
