"""The summary of a run, from its files: the steps before a resume count too."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from megatron_grpo.observability.run_files import SUMMARY_FILE, VALIDATION_FILE, read_metrics, read_steps, write_json

# Phases that count as work; the rest of a step is overhead.
WORK_PHASES = ("generation", "logprobs", "values", "train_value", "train", "refit")


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended."""

    outcome: Literal["completed", "early_stop", "data_used_up", "failed", "interrupted"]
    reason: str | None = None  # why the run ended before its last step; None: it was completed


COMPLETED = RunEnd("completed")


def write_summary(
    run_dir: str | Path,
    *,
    samples_per_step: int,
    end: RunEnd = COMPLETED,
    startup_s: float | None = None,
    train_s: float | None = None,
    startup_parts_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Write summary.json (docs/observing.md lists its entries), and return its contents.

    `startup_s`: seconds until all processes were up; None: the start-up failed. `train_s`: seconds after that,
    including validations and checkpoints; None: not known.
    """
    folder = Path(run_dir)
    steps = read_metrics(folder)
    validations = read_steps(folder / VALIDATION_FILE)
    rewards = _select_values(steps, "reward")
    first, last = (validations[0], validations[-1]) if validations else ({}, {})
    # Rates are ratios of sums: a mean of the steps' ratios would give short steps the weight of long ones.
    totals = [step["timing"]["total"] for step in steps]
    total = sum(totals)
    phases = sorted({phase for step in steps for phase in step["timing"]} - {"total"})
    phase_s = {phase: sum(step["timing"].get(phase, 0.0) for step in steps) for phase in phases}
    work = sum(phase_s.get(phase, 0.0) for phase in WORK_PHASES)
    summary: dict[str, Any] = {
        "outcome": end.outcome,
        "reason": end.reason,
        "steps": len(steps),
        "samples": len(steps) * samples_per_step,
        "accuracy_before": first.get("val_accuracy"),
        "accuracy_after": last.get("val_accuracy"),
        "accuracy_before_step": first.get("step"),
        "accuracy_after_step": last.get("step"),
        "startup_s": startup_s,
        "startup_parts_s": dict(startup_parts_s or {}),
        "train_s": train_s,
        "step_s": _compute_mean(totals),
        "phase_s": {phase: seconds / len(steps) for phase, seconds in phase_s.items()},
        "samples_per_s": len(steps) * samples_per_step / total if total else None,
        "overhead_fraction": 1.0 - work / total if total else None,
        "reward_first": _compute_mean(rewards[:10]),
        "reward_last": _compute_mean(rewards[-10:]),
        "token_mult_prob_error_max": max(_select_values(steps, "token_mult_prob_error_max"), default=None),
        "token_mult_prob_error_mean": _compute_mean(_select_values(steps, "token_mult_prob_error")),
    }
    write_json(folder / SUMMARY_FILE, summary)
    return summary


def describe_change(run_dir: str | Path, summary: Mapping[str, Any]) -> str:
    """Describe the run's most telling figure, first and last; empty if it has none.

    `summary`: of `write_summary`. Held-out accuracy comes before held-out loss, reward and loss.
    """
    folder = Path(run_dir)
    losses = _select_values(read_steps(folder / VALIDATION_FILE), "val_loss")
    learnt = _select_values(read_metrics(folder), "loss")
    changes = {
        "held-out accuracy": (summary["accuracy_before"], summary["accuracy_after"]),
        "held-out loss": (losses[0], losses[-1]) if losses else (None, None),
        "reward": (summary["reward_first"], summary["reward_last"]),
        "loss": (learnt[0], learnt[-1]) if learnt else (None, None),
    }
    texts = (
        f"{name} {first:.3f} -> {last:.3f}" for name, (first, last) in changes.items() if None not in (first, last)
    )
    return next(texts, "")


def _select_values(steps: list[dict[str, Any]], name: str) -> list[float]:
    return [step[name] for step in steps if step.get(name) is not None]


def _compute_mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def make_killed_run_command(run_dir: Path, samples_per_step: int, *, report: bool) -> list[str]:
    """Make the command line of `main`, which runs after the driver was killed."""
    return [sys.executable, "-m", __name__, str(run_dir), str(samples_per_step), *(["report"] if report else [])]


def main(run_dir: Path, samples_per_step: int, *, report: bool) -> None:
    """Write the missing reports of a run whose driver was killed."""
    # A summary that the run had written before the kill stays.
    if (run_dir / SUMMARY_FILE).exists():
        return
    reason = "the driver was killed; if memory ran out, the kernel's log (dmesg) says so"
    write_summary(run_dir, samples_per_step=samples_per_step, end=RunEnd("failed", reason))
    if report:
        from megatron_grpo.observability.page.write import try_to_write_report

        try_to_write_report(run_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), report="report" in sys.argv[3:])
