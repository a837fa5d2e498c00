"""What is asked of the prompts of coming steps, whoever begins them ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.data.responses import SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingSteps:
    """The generation batches that are still to come."""

    samples_per_prompt: int
    """Responses to each prompt."""
    settings: SamplingSettings
    """How tokens are drawn."""
    run_seed: int
    """Seed of the run, from which those of the responses follow."""
    begun: int
    """Generation batches that steps have taken so far."""
    max_num_steps: int
    """Steps after which nothing is needed any more."""
