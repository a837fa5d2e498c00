"""Rollouts of an earlier run from their file into the object store, in the rollout worker that is asked to."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.packed import Packed
from megatron_grpo.data.recording import StepFacts, read_recorded
from megatron_grpo.data.trajectory import Outcome
from megatron_grpo.rollouts.payloads import Bundler, Collected


def load(file: Path) -> tuple[StepFacts, Collected]:
    """Read a step's file: what is known of its sampling, and its groups as if they had been sampled here.

    Raises:
        RunError: it cannot be read.
    """
    try:
        facts, groups = read_recorded(file)
    except (OSError, ValueError) as error:
        raise RunError(f"the recorded rollouts cannot be read: {file} {error}") from None
    bundler = Bundler(len(groups))
    for number, trajectories in enumerate(groups):
        bundler.add(number, trajectories)
    outcomes = [[one.outcome for one in trajectories] for trajectories in groups]
    return facts, Collected(bundler.finish(), cast(list[list[Outcome]], Packed(outcomes)), [])
