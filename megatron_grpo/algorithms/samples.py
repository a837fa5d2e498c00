"""The rollouts that a step trains on: one generation batch, or as many as dynamic sampling needs to fill the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron_grpo.algorithms.context import SamplingRun
from megatron_grpo.algorithms.records import RecordedSteps
from megatron_grpo.algorithms.step_advantages import Scores, score
from megatron_grpo.batch.generation_requests import compute_engine_metrics
from megatron_grpo.batch.rollout_files import StepFacts
from megatron_grpo.batch.trajectory import Outcome, SampledGroup, renumber_groups
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.rollout_metrics import compute_age_metrics

_DYNAMIC_SAMPLING = "dynamic_sampling_"
_GEN_BATCHES = f"{_DYNAMIC_SAMPLING}gen_batches"


@dataclass(slots=True)
class StepSamples:
    """Rollouts that were sampled for a step, with figures of sampling.

    Example: num_prompts_per_step=2 with dynamic sampling. Of three sampled groups A, B, C the rewards of B are all
    equal, so `groups` is [A, C], `sampled` has the outcomes of A, B and C, and `dropped` those of B.
    """

    groups: list[SampledGroup]  # groups to train on, numbered by their position in the step
    scores: Scores
    sampled: list[Outcome]  # outcomes of all rollouts that were sampled, including those that dynamic sampling dropped
    metrics: dict[str, float]
    engines: dict[str, float] = field(default_factory=dict)  # load and speed of the engines
    dropped: list[Outcome] = field(default_factory=list)  # the part of `sampled` that dynamic sampling dropped
    carried: int = 0
    """Number of groups, the first of `groups`, that were sampled before the run was resumed; `sampled` lacks them."""

    def make_facts(self, loader_state: dict[str, Any]) -> StepFacts:
        """Make the facts for the step's file of rollouts."""
        return StepFacts(
            position=loader_state,
            longest=max(tokens for outcome in self.outcomes for tokens, _ in outcome.sequences),
            dropped=self.dropped,
            carried=self.carried,
            dynamic_sampling={name: self.metrics[name] for name in self.metrics if name.startswith(_DYNAMIC_SAMPLING)},
        )

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes of the groups to train on, prompt by prompt."""
        return [outcome for group in self.groups for outcome in group.outcomes]


def sample(run: SamplingRun, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    """Sample the groups of the next step; None: none are left.

    SamplingError: an engine failed, too many rollouts failed, a reward is not finite, or dynamic sampling did not fill
    the step within its limit.
    """
    run.placement.wake_engines(timer)
    if isinstance(run.loader, RecordedSteps):
        return _read_recorded(run, run.loader, timer)
    if run.config.sampled_loop.use_dynamic_sampling:
        samples = _fill_step(run, batches, timer)
    elif groups := _sample_groups(run, batches, timer):
        outcomes = [outcome for group in groups for outcome in group.outcomes]
        metrics = _compute_async_metrics(run, outcomes, timer)
        samples = StepSamples(groups, score(run.config, outcomes), outcomes, metrics)
    else:
        samples = None
    if samples is not None:
        # The counts are since the last step, so they include all batches of dynamic sampling.
        samples.engines = compute_engine_metrics(run.take_engine_counts().values())
    return samples


def _fill_step(run: SamplingRun, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    # If the prompts end before a step is full, its groups stay in run.batch_cache, for a continuation with more epochs.
    config, loop, carried = run.config, run.config.sampled_loop, len(run.batch_cache)
    sampled: list[Outcome] = []
    dropped: list[Outcome] = []
    # Groups that waited in a checkpoint are scored anew: it has their rewards, not their scores.
    waiting = [(group, score(config, group.outcomes)) for group in run.batch_cache]
    without_signal = surplus = 0
    for gen_batches in itertools.count(1):
        groups = _sample_groups(run, batches, timer)
        if not groups:
            return None
        scored = [(group, score(config, group.outcomes)) for group in groups]
        signal = torch.cat([scores.has_signal for _, scores in scored])
        without_signal += int((~signal).sum())
        surplus += max(0, len(waiting) + int(signal.sum()) - loop.num_prompts_per_step)  # cut off: the step is full
        batch = dynamic_sampling(scored, signal, num_prompts_per_step=loop.num_prompts_per_step, batch_cache=waiting)
        waiting = batch.batch_cache
        run.batch_cache[:] = [group for group, _ in waiting]
        sampled += [outcome for group in groups for outcome in group.outcomes]
        dropped += [outcome for group, _ in batch.dropped for outcome in group.outcomes]
        if batch.is_batch_complete:
            break
        if gen_batches >= loop.dynamic_sampling_max_gen_batches:
            raise SamplingError(
                f"dynamic sampling found {len(waiting)} of the {loop.num_prompts_per_step} prompts of a step in "
                f"{config.loop_name}.dynamic_sampling_max_gen_batches={gen_batches} generation batches: the samples of "
                f"nearly every prompt get the same reward; choose easier or harder prompts, more "
                f"{config.loop_name}.num_generations_per_prompt, or a higher limit"
            )
    groups = renumber_groups([group for group, _ in batch.groups])
    metrics = {
        _GEN_BATCHES: float(gen_batches),
        "dynamic_sampling_groups_without_signal": float(without_signal),
        "dynamic_sampling_groups_sliced": float(surplus),
        **_compute_async_metrics(run, [outcome for group in groups for outcome in group.outcomes], timer),
    }
    scores = Scores.join([scores for _, scores in batch.groups])
    return StepSamples(groups, scores, sampled, metrics, dropped=dropped, carried=carried)


def _read_recorded(run: SamplingRun, recording: RecordedSteps, timer: StepTimer) -> StepSamples | None:
    state, loop = run.state, run.config.sampled_loop
    step = state["total_steps"] + 1
    if step not in recording.files:
        return None
    with timer.phase("recording"):
        facts, groups = run.rollouts.load(recording.files[step])
    run.make_check(groups, step).require_finite_samples()
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    sampled = outcomes[facts.carried * loop.num_generations_per_prompt :] + facts.dropped
    # Progress and the position in the data advance as they did in the recorded run.
    recording.load_state_dict(facts.position)
    run.batch_cache.clear()
    state["generation_batches"] += int(facts.dynamic_sampling.get(_GEN_BATCHES, 1))
    state["consumed_samples"] += len(sampled) // loop.num_generations_per_prompt
    metrics = dict(facts.dynamic_sampling) if loop.use_dynamic_sampling else {}
    scores = score(run.config, outcomes)
    return StepSamples(groups, scores, sampled, metrics, dropped=facts.dropped, carried=facts.carried)


def _sample_groups(run: SamplingRun, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> list[SampledGroup] | None:
    """Sample the next generation batch; None: no prompts are left."""
    state, loop = run.state, run.config.sampled_loop
    if run.buffer is not None:
        groups = run.buffer.take(batches, state["total_steps"], timer)
    elif (prompts := next(batches, None)) is not None:
        samples, number = loop.num_generations_per_prompt, state["generation_batches"] + 1
        rollout_settings = run.rollouts.make_settings(samples, run.settings, loop.seed, number)
        groups = run.rollouts.collect(prompts, rollout_settings, timer)
    else:
        groups = None
    if groups is None:
        return None
    state["generation_batches"] += 1
    state["consumed_samples"] += len(groups)
    run.make_check(groups, state["total_steps"] + 1).require_finite_samples()
    return groups


def _compute_async_metrics(run: SamplingRun, outcomes: list[Outcome], timer: StepTimer) -> dict[str, float]:
    if run.buffer is None:
        return {}
    waited = sum(timer.seconds.get(phase, 0.0) for phase in ("generation", "environment"))
    ages = compute_age_metrics(outcomes, run.state["total_steps"])
    return {**ages, **run.buffer.count_prompts(), "exposed_generation_s": waited}


Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class DynamicBatch(Generic[Group]):
    """Result of dynamic sampling after one generation batch."""

    groups: list[Group]  # groups to train on, num_prompts_per_step of them; empty while the batch is not complete
    is_batch_complete: bool
    batch_cache: list[Group]
    """Groups with a signal that wait for the rest of their step; empty when the batch is complete."""
    dropped: list[Group]
    """Groups of this generation batch that are not used, in their order: without a signal, or after the last needed."""


def dynamic_sampling(
    groups: Sequence[Group], signal: Tensor, *, num_prompts_per_step: int, batch_cache: Sequence[Group] = ()
) -> DynamicBatch[Group]:
    """Add groups with a signal to those that wait for a step.

    `groups` are of one generation batch, in the order of sampling; `batch_cache` has groups of earlier ones, which wait
    for this step. `signal`: [groups], bool, see `has_signal`.
    """
    assert signal.shape == (len(groups),)
    assert signal.dtype == torch.bool
    # Surplus groups do not wait for the next step: they were sampled from weights that are about to change.
    is_used = (signal & (signal.cumsum(0) <= num_prompts_per_step - len(batch_cache))).tolist()
    useful = [*batch_cache, *(group for group, used in zip(groups, is_used, strict=True) if used)]
    is_complete = len(useful) >= num_prompts_per_step
    return DynamicBatch(
        groups=useful[:num_prompts_per_step] if is_complete else [],
        is_batch_complete=is_complete,
        batch_cache=[] if is_complete else useful,
        dropped=[group for group, used in zip(groups, is_used, strict=True) if not used],
    )
