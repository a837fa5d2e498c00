"""What a run measured of its own steps, and a replay of a step in its layout and on one rank."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.batch.replay_files import find_library_versions
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.observability.run_files import METRICS_FILE, read_steps
from megatron_grpo.verification.replay.compare import Comparison, choose_tolerances, compare
from megatron_grpo.verification.replay.record import RecordedStep, open_step
from megatron_grpo.verification.replay.replayed_step import replay_step

ERROR = "token_mult_prob_error"
FIGURES = (ERROR, f"{ERROR}_max", "canary_logprob_error", "canary_limit", f"{ERROR}_off")
"""Metrics of a step (docs/observing.md), in the order of the fields of `RecordedFigures`."""
AGREEMENT_FACTOR = 5.0
"""Recorded and computed excess over 1 agree up to this factor: they are means over different tokens."""
SUSPICIOUS_FACTOR = 10.0
"""A step is suspicious if its excess is this many times that of the run's better steps."""
STALE_EXCESS = 1.0
"""Largest excess that staleness may explain where it cannot be computed again."""
NOTICEABLE = {"float32": 1e-3, "bfloat16": 0.05}
"""By precision of the run, the least excess over 1 that makes a step suspicious."""
MOST_RANKS = 8
"""Most ranks of a layout that are started on a machine without GPUs, unless it has more processors."""
HIDDEN_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RecordedFigures:
    """Recorded figures of a step; NaN: not finite; None: not recorded."""

    error: float | None = None
    worst: float | None = None
    canary: float | None = None
    """Difference that the canary after the refit of this step had."""
    canary_limit: float | None = None
    is_off: float | None = None
    """1: the run itself flagged the step's error as beyond its noise."""

    @property
    def canary_failed(self) -> bool:
        """Whether the canary differed by more than its limit."""
        return self.canary is not None and self.canary_limit is not None and not self.canary <= self.canary_limit

    @property
    def excess(self) -> float:
        """The error less 1: infinite if not finite, 0 without one."""
        if self.error is None:
            return 0.0
        return self.error - 1.0 if math.isfinite(self.error) else math.inf


def read_run_figures(run_dir: Path) -> dict[int, RecordedFigures]:
    """Read a run's figures by step; empty without a file of metrics.

    Raises:
        ValueError: the file of metrics is damaged; the message names file and line.
    """
    rows = read_steps(run_dir / METRICS_FILE)
    return {int(row["step"]): RecordedFigures(*(_read_figure(row, name) for name in FIGURES)) for row in rows}


def _read_figure(row: Mapping[str, Any], name: str) -> float | None:
    values = {**row.get("throughput", {}), **row}  # "throughput" has the figures of the canary
    if name not in values:
        return None
    return math.nan if values[name] is None else float(values[name])


def find_suspicious_steps(
    figures: Mapping[int, RecordedFigures], precision: str, *, has_older_tokens: bool
) -> list[int]:
    """Find steps that stand out or that the run flagged, worst first.

    Args:
        figures: recorded figures by step.
        precision: precision of the policy.
        has_older_tokens: whether steps train on tokens of earlier versions, whose error varies a hundredfold.
    """
    limit = STALE_EXCESS
    if not has_older_tokens:
        excesses = sorted(step.excess for step in figures.values())
        # The lower quartile, not the median, because most steps of a run may be wrong.
        usual = excesses[len(excesses) // 4] if excesses else 0.0
        limit = max(SUSPICIOUS_FACTOR * usual, NOTICEABLE.get(precision, NOTICEABLE["bfloat16"]))
        limit = min(limit, STALE_EXCESS)
    beyond = {number: step.excess for number, step in figures.items() if step.excess > limit or step.is_off}
    return sorted(beyond, key=lambda number: -beyond[number])


def is_beyond(recorded: float, computed: float, rounding: float) -> bool:
    """True if computation and rounding explain less than was recorded.

    Args:
        recorded: the run's error less 1; infinite or NaN if it was not finite.
        computed: the error less 1 of the tokens that were computed again.
        rounding: mean difference of log-probabilities that rounding explains, in nats.
    """
    return not recorded <= AGREEMENT_FACTOR * (max(computed, 0.0) + rounding)


@dataclass(frozen=True, slots=True)
class LayoutReplay:
    """The outcome of `replay_in_layout`."""

    command: str
    """The command that replays the step on one rank."""
    text: str
    """The result, or why there is none."""
    differs: bool
    """Whether the layouts differ."""


def replay_in_layout(run_dir: Path, step: int, config: Config, timeout_s: float) -> LayoutReplay:
    """Replay a step in the run's layout and on one rank.

    `timeout_s`: deadline of each replay.
    """
    overrides = _list_one_rank_overrides(config)
    command = " ".join(["python -m megatron_grpo.replay", str(run_dir), f"step={step}", *overrides])
    ranks, gpus = config.policy.parallel.world_size, torch.cuda.device_count()
    room = gpus or max(MOST_RANKS, os.cpu_count() or 1)
    if ranks > room:
        return LayoutReplay(
            command, f"its {ranks} ranks are more than this machine has room for ({room})", differs=False
        )
    try:
        record, changed = open_step(run_dir, step), open_step(run_dir, step, overrides)
        sides = [
            replay_step(recorded_step, hidden_tokens=HIDDEN_TOKENS, timeout_s=timeout_s, gpus=gpus)
            for recorded_step in ((record, changed) if overrides else (record,))
        ]
    except ConfigError as error:
        reason = "; ".join(f"{problem.subject} {problem.text}" for problem in error.problems)
        return LayoutReplay(command, f"its replay could not be done here: {reason}", differs=False)
    except (RunError, ValueError, OSError) as error:
        return LayoutReplay(command, f"its replay could not be done here: {error}", differs=False)
    if not overrides:
        return LayoutReplay(
            command, f"the run had one rank without packing; {_describe_versions(record)}", differs=False
        )
    limits = choose_tolerances(record.config.policy, changed.config.policy)
    compared = compare(("replayed", "on one rank"), record, (sides[0], sides[1]), limits)
    if compared.agrees:
        text = f"the run's layout and one rank agree here in every quantity; {_describe_versions(record)}"
        return LayoutReplay(command, text, differs=False)
    return LayoutReplay(
        command, f"the run's layout and one rank differ: {_describe_first_difference(compared)}", differs=True
    )


def _list_one_rank_overrides(config: Config) -> list[str]:
    parallel, plain = config.policy.parallel, ParallelConfig()
    names = [name for name in vars(plain) if getattr(parallel, name) != getattr(plain, name)]
    values = {name: getattr(plain, name) for name in names}
    texts = [f"policy.parallel.{name}={_write_yaml(value)}" for name, value in values.items()]
    return texts + (["policy.packing=false"] if config.policy.packing else [])


def _write_yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()


def _describe_versions(record: RecordedStep) -> str:
    """Describe what else may be the reason: other packages or devices."""
    recorded = {} if record.figures is None else record.figures.versions
    versions = find_library_versions()
    changed = [
        f"{name} was {version} and is {versions.get(name)}"
        for name, version in recorded.items()
        if versions.get(name) != version
    ]
    if changed:
        return "packages differ: " + ", ".join(changed)
    return "so the reason was in the run alone: its devices, its packages, or its program at that time"


def _describe_first_difference(compared: Comparison) -> str:
    location = compared.first_difference
    assert location is not None, "it does not agree"
    layer = "" if location["layer"] is None else f" of layer {location['layer']}"
    at = location["point"] or location["tensor"] or ""
    where = f", first in {at}" if at else ""
    return f"{location['quantity']}{layer}{where}"
