"""Cells of a drill: what happens to which process, in which phase of a run."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron_grpo.config.errors import suggest_name

# Processes by their names in heartbeats.
_NAMES = {
    "policy": r"policy rank \d+",
    "value": r"value model rank \d+",
    "engine": r"generation engine \d+",
    "engine_core": r"generation engine \d+ core",
    "engine_worker": r"generation engine \d+ worker .+",
    "rollout_worker": r"rollout worker \d+",
    "environment": r"environment .+ worker \d+",
    "driver": r"driver",
}
RAYLET = "raylet"  # Ray's process of a machine, which has no heartbeat
PROCESSES = (*_NAMES, RAYLET)
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}
# Phases of a run, by phases of its driver: within a step, and between steps.
_IN_STEP = {
    "refit": {"refit"},
    "training": {"training step"},
    "logprobs": {"logprobs"},
    "generation": {"generation", "environment"},
}
_BETWEEN_STEPS = {
    "checkpoint": {"checkpoint", "completing a checkpoint"},
    "validation": {"generation", "environment", "held_out"},
}
PHASES = ("generation", "logprobs", "training", "refit", "checkpoint", "validation")
_STEP = re.compile(r"step \d+")  # the driver's phase around a step


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault of a drill.

    Example: Cell("policy", "kill", "training") kills a rank of the policy in a training step.
    """

    process: str  # of PROCESSES
    action: str  # of ACTIONS
    phase: str  # of PHASES

    def __str__(self) -> str:
        return f"{self.process}:{self.action}:{self.phase}"


def parse_cells(patterns: Sequence[str]) -> list[Cell]:
    """List the cells that match patterns, in the order of these.

    Patterns are PROCESS:ACTION:PHASE with wildcards. Parts at the end may be left out: "policy:kill"
    is "policy:kill:*". ValueError: a part matches nothing.
    """
    cells: dict[Cell, None] = {}
    for pattern in patterns:
        parts = pattern.split(":")
        if len(parts) > 3:
            raise ValueError(f"cells={pattern} has {len(parts)} parts; write PROCESS:ACTION:PHASE")
        choices = [
            _select(part, names)
            for part, names in zip([*parts, "*", "*"], (PROCESSES, tuple(ACTIONS), PHASES), strict=False)
        ]
        cells |= dict.fromkeys(
            Cell(process, action, phase) for process in choices[0] for action in choices[1] for phase in choices[2]
        )
    return list(cells)


def _select(part: str, names: Sequence[str]) -> list[str]:
    selected = [name for name in names if fnmatchcase(name, part)]
    if not selected:
        raise ValueError(f"cells has {part}{suggest_name(part, names)}")
    return selected


def choose_cells(cells: Sequence[Cell], count: int | None, generator: random.Random) -> list[Cell]:
    """Choose `count` cells at random, in their order; None: all."""
    if count is None or count >= len(cells):
        return list(cells)
    return [cells[index] for index in sorted(generator.sample(range(len(cells)), count))]


def is_of_kind(name: str, process: str) -> bool:
    """True if a heartbeat's name is that of such a process."""
    return process in _NAMES and re.fullmatch(_NAMES[process], name) is not None


def list_driver_phases(phase: str) -> set[str]:
    """List the driver's phases that make up a phase of the run."""
    return (_IN_STEP | _BETWEEN_STEPS)[phase]


def identify_phase(driver_phases: Sequence[str]) -> str | None:
    """Identify the phase of a run by the driver's phases."""
    is_in_step = any(map(_STEP.fullmatch, driver_phases))
    phases = _IN_STEP if is_in_step else _BETWEEN_STEPS
    return next((phase for phase, names in phases.items() if names & {*driver_phases}), None)
