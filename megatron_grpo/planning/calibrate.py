"""Calibration: fits the efficiencies and the reserve with which a plan repeats the seconds and memory of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import yaml

from megatron_grpo.observability.run_files import read_metrics
from megatron_grpo.planning.step import StepTimes
from megatron_grpo.platform.hardware import Efficiency, Hardware

WARM_UP_STEPS = 2
"""First steps of a run, which are left out because kernels, caches and communicators start in them."""
_LEAST, _MOST = 1 / 8, 8.0  # limits of the factor by which an efficiency is changed

_COMPUTE = ("matmul", "matmul_fp8", "grouped", "attention", "memory")
_DECODE = ("decode_memory",)
_NETWORK = ("nvlink", "network")
FITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "generation": (_DECODE, ("generation",)),
    "refit": (_NETWORK, ("refit",)),
    "train": (_COMPUTE, ("train", "optimizer")),
}
"""By phase of a run's metrics: the efficiencies that are fitted on it, and the plan's phases that it covers.

Training is fitted last, because its messages take as long as the network's efficiencies say."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of a run's steps after the first ones."""

    seconds: dict[str, float]
    """Seconds by phase of the metrics, "total" included."""
    tensors_gib: float
    """Most memory of a policy rank's tensors; 0: the run was on a CPU."""
    steps: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """The profile that repeats a run, and the plan's error before."""

    hardware: Hardware
    rows: list[tuple[str, float, float, float]]
    """(name, planned before, measured, planned with the new profile) of each compared figure; seconds or GiB."""

    def render_table(self) -> list[str]:
        """Render lines for a terminal."""
        lines = [f"{'':<12}{'planned':>10}{'measured':>10}{'off by':>9}{'calibrated':>12}"]
        for name, before, run, after in self.rows:
            lines.append(f"{name:<12}{before:>10.3f}{run:>10.3f}{before / run - 1:>+9.1%}{after:>12.3f}")
        return lines


def read_measurements(run_dir: Path) -> Measured:
    """Read the medians of a run's metrics.jsonl.

    Raises:
        ValueError: the run has too few steps.
    """
    lines = read_metrics(run_dir)[WARM_UP_STEPS:]
    if not lines:
        raise ValueError(f"{run_dir} has no steps after the first {WARM_UP_STEPS}, which start kernels and caches")
    phases = {name for line in lines for name in line["timing"]}
    seconds = {name: median(line["timing"].get(name, 0.0) for line in lines) for name in phases}
    tensors = max(line.get("throughput", {}).get("gpu_memory_gib", 0.0) for line in lines)
    return Measured(seconds, tensors, len(lines))


def fit_hardware(
    measured: Measured, plan: Callable[[Hardware], StepTimes], hardware: Hardware, planned_tensors_gib: float
) -> Calibration:
    """Fit a profile to a run.

    One factor for each row of `FITS` makes the plan take as long as the run; efficiencies stay at or below 1. Memory of
    the policy's tensors beyond the plan's is added to the reserve.

    Args:
        measured: the run.
        plan: the plan of the run's configuration and lengths on other hardware.
        hardware: the profile before.
        planned_tensors_gib: the plan's peak of the fullest rank's tensors.
    """
    before, fitted = plan(hardware), hardware
    for name, (efficiencies, phases) in FITS.items():
        target = measured.seconds.get(name, 0.0)
        if target > 0 and _sum(before, phases) > 0:
            fitted = _fit_efficiency(fitted, efficiencies, partial(_time_planned, plan, phases), target)
    # Tensors that the plan does not know of; a CPU's run measures none.
    extra = max(0.0, measured.tensors_gib - planned_tensors_gib) if measured.tensors_gib else 0.0
    fitted = replace(fitted, reserve_gib=round(hardware.reserve_gib + extra, 3))
    after, rows = plan(fitted), []
    for name, (_, phases) in FITS.items():
        if measured.seconds.get(name, 0.0) > 0 and _sum(before, phases) > 0:
            rows.append((name, _sum(before, phases), measured.seconds[name], _sum(after, phases)))
    if measured.seconds.get("total", 0.0) > 0:
        rows.append(("step", before.step_s, measured.seconds["total"], after.step_s))
    if measured.tensors_gib:
        rows.append(("tensors GiB", planned_tensors_gib, measured.tensors_gib, planned_tensors_gib + extra))
    return Calibration(fitted, rows)


def write_profile(file: Path, hardware: Hardware, name: str) -> None:
    """Write a profile as YAML, for plan.hardware=FILE."""
    file.write_text(yaml.safe_dump({name: hardware.as_dict()}, sort_keys=False), encoding="utf-8")


def _sum(times: StepTimes, phases: tuple[str, ...]) -> float:
    phases_s: Mapping[str, float] = times.phase_s
    return sum(phases_s.get(name, 0.0) for name in phases)


def _time_planned(plan: Callable[[Hardware], StepTimes], phases: tuple[str, ...], hardware: Hardware) -> float:
    return _sum(plan(hardware), phases)


def _fit_efficiency(
    hardware: Hardware, names: tuple[str, ...], seconds: Callable[[Hardware], float], target: float
) -> Hardware:
    # Bisection of the factor's logarithm. If no factor reaches the target, it ends at the nearest limit.
    low, high = _LEAST, _MOST
    for _ in range(40):
        middle = (low * high) ** 0.5
        if seconds(_scale_efficiency(hardware, names, middle)) > target:
            low = middle
        else:
            high = middle
    return _scale_efficiency(hardware, names, (low * high) ** 0.5)


def _scale_efficiency(hardware: Hardware, names: tuple[str, ...], factor: float) -> Hardware:
    reached: Efficiency = hardware.efficiency
    changed = {name: round(min(1.0, getattr(reached, name) * factor), 4) for name in names}
    return replace(hardware, efficiency=replace(reached, **changed))
