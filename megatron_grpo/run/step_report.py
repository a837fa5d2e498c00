"""What one step of an algorithm reports to the loop around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.trajectory import Outcome


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did."""

    metrics: dict[str, float]
    timing: dict[str, float]
    throughput: dict[str, float]
    sampled: list[Outcome]
    """What became of everything that was sampled, also of what dynamic sampling dropped."""
    remarks: Sequence[str] = ()
    """What somebody who watches the run should hear of."""
    failure: RunError | None = None
    """What went wrong after the models had learnt from the samples: the step counts, and the run cannot go on."""
