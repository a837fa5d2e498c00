"""The keys of rollouts: who runs them, how long one may take, how many may fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from megatron_grpo.config.section import Positive, Seconds, Section


@dataclass(kw_only=True)
class RolloutsConfig(Section):
    """A prompt's samples on their way through generation and environments."""

    num_workers: Positive | None = None
    """Processes that run rollouts; null: one for every 8 engines, at least one."""

    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of a step's rollouts that may fail (raise or time out, after one retry); beyond it the run stops
    with the reason, its finished steps saved."""

    timeout_s: Seconds = 800.0
    """Deadline of one rollout: all its turns and its scoring."""
