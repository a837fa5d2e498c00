"""Where the samples of a step come from, and what is kept of them from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.config.schema import Config
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.rollouts.ahead import SamplingAhead
from megatron_grpo.rollouts.oversampling import Oversampling
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.non_finite import FiniteGuard
from megatron_grpo.run.recorded_steps import RecordedSteps
from megatron_grpo.run.save_state import GRPOSaveState


@dataclass(kw_only=True)
class SampleSource:
    """What the samples of a step are drawn with, and what is kept of it from step to step."""

    config: Config
    rollouts: RolloutPool
    settings: SamplingSettings
    guard: FiniteGuard
    state: GRPOSaveState
    """Progress of the run, in which sampling counts the prompts and generation batches that it uses."""
    waiting: list[SampledGroup]
    """Groups that dynamic sampling keeps for the step that is being filled; changed in place."""
    ahead: SamplingAhead | Oversampling | None = None
    """What samples while steps train; None: a step samples when it asks."""
    recorded: RecordedSteps | None = None
    """What an earlier run sampled, which is taken instead; None: sampling."""

    @property
    def used_up(self) -> str:
        """Why the run ends when nothing is left for a further step."""
        epochs = self.config.loop.max_num_epochs
        return f"the data is used up: {epochs} epoch(s)" if self.recorded is None else self.recorded.used_up
