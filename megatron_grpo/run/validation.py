"""How good the policy is on held-out prompts."""

from __future__ import annotations

from dataclasses import replace

from megatron_grpo.config.loop_schema import VALIDATION_METRICS, VALIDATION_PREFIX
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.rollouts.metrics import rollout_metrics
from megatron_grpo.run.context import GRPORun


def validate(run: GRPORun) -> dict[str, float]:
    """Accuracy, reward and length on the validation prompts, one response each.

    Returns:
        Metrics whose names start with val_; empty without validation data.

    Raises:
        SamplingError: an engine or an environment failed, or a reward is not finite.
        RunError: a sampling log-probability is not finite.
    """
    if not run.val_prompts:
        return {}
    groups = _respond(run)
    shown = groups[: run.config.logger.num_val_samples_to_print]
    run.logger.show_samples(run.val_prompts, [group[0] for group in run.rollouts.fetch(shown)])
    measured = rollout_metrics([outcome for group in groups for outcome in group.outcomes])
    return {f"{VALIDATION_PREFIX}{name}": measured[name] for name in VALIDATION_METRICS if name in measured}


def _respond(run: GRPORun) -> list[SampledGroup]:
    """A response to each validation prompt, scored."""
    timer = StepTimer()
    run.placement.turn_to_sampling(timer)
    groups: list[SampledGroup] = []
    size = run.config.loop.val_batch_size
    for start in range(0, len(run.val_prompts), size):
        groups += run.rollouts.collect(
            run.val_prompts[start : start + size],
            samples_per_prompt=1,
            settings=replace(run.samples.settings, temperature=run.config.loop.val_temperature),
            run_seed=run.config.loop.seed,
            step=0,
            timer=timer,
        )
    run.rollouts.take_engine_counts()  # what a validation had the engines do is no step's
    run.guard.require_finite_samples(groups, run.state["total_steps"], "validation")
    return groups
