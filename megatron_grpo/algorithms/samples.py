"""The rollouts that a step trains on: one generation batch, or as many as dynamic sampling takes to fill the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron_grpo.algorithms.context import SamplingRun
from megatron_grpo.algorithms.records import RecordedSteps
from megatron_grpo.algorithms.step_advantages import Scores, score
from megatron_grpo.batch.generation_requests import engine_figures
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
    """Rollouts that were sampled for a step, and figures of their sampling."""

    groups: list[SampledGroup] = field(default_factory=list)
    """Groups to train on, numbered by their place in the step."""
    scores: Scores | None = None
    """Scores of the groups to train on, where dynamic sampling needed them; None: not computed yet."""
    sampled: list[Outcome] = field(default_factory=list)
    """Outcomes of all rollouts that were sampled, including those that dynamic sampling dropped."""
    metrics: dict[str, float] = field(default_factory=dict)
    engines: dict[str, float] = field(default_factory=dict)
    """Load and speed of the engines, which depend on timing."""
    dropped: list[Outcome] = field(default_factory=list)
    """The part of `sampled` that dynamic sampling dropped."""
    carried: int = 0
    """Number of groups, the first of `groups`, that were sampled before the run was resumed; `sampled` lacks them."""

    def facts(self, position: dict[str, Any]) -> StepFacts:
        """Facts about the step for its file of rollouts; `position`: the loader's state after the step."""
        names = [name for name in self.metrics if name.startswith(_DYNAMIC_SAMPLING)]
        return StepFacts(
            position=position,
            longest=max(outcome.tokens for outcome in self.outcomes),
            dropped=self.dropped,
            carried=self.carried,
            dynamic_sampling={name: self.metrics[name] for name in names},
        )

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes of the rollouts that are trained on; the samples of a prompt are neighbours."""
        return [outcome for group in self.groups for outcome in group.outcomes]


def sample(run: SamplingRun, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    """Sample the groups of the next step, or read them from a recording; None: the data, or the recording, is used up.

    Groups of a step that dynamic sampling could not fill stay in run.batch_cache, for a continuation with more epochs.

    Raises:
        SamplingError: an engine failed, too many rollouts failed, a reward is not finite, or dynamic sampling did not
            fill the step within its limit.
        RunError: a sampling log-probability is not finite.
    """
    if isinstance(run.loader, RecordedSteps):
        return _recorded(run, run.loader, timer)
    samples, loop = StepSamples(carried=len(run.batch_cache)), run.config.training_loop
    without_signal = surplus = gen_batches = 0
    known: dict[int, Scores] = {}
    while groups := _next_groups(run, batches, timer):
        gen_batches += 1
        outcomes = [outcome for group in groups for outcome in group.outcomes]
        samples.sampled += outcomes
        if not loop.use_dynamic_sampling:
            samples.groups, samples.metrics = groups, _metrics_of_async(run, outcomes, timer)
            break
        known |= {id(group): score(run.config, group.outcomes) for group in groups}
        kept = torch.cat([known[id(group)].kept for group in groups])
        selected = dynamic_sampling(
            groups, kept, num_prompts_per_step=loop.num_prompts_per_step, batch_cache=run.batch_cache
        )
        run.batch_cache[:] = selected.batch_cache
        without_signal += selected.without_signal
        surplus += selected.surplus
        used = {id(group) for group in (*selected.groups, *selected.batch_cache)}
        samples.dropped += [one for group in groups if id(group) not in used for one in group.outcomes]
        if selected.is_batch_complete:
            scores = [known.get(id(group)) or score(run.config, group.outcomes) for group in selected.groups]
            samples.groups, samples.scores = renumber_groups(selected.groups), Scores.joined(scores)
            samples.metrics = {
                _GEN_BATCHES: float(gen_batches),
                "dynamic_sampling_groups_without_signal": float(without_signal),
                "dynamic_sampling_groups_sliced": float(surplus),
                **_metrics_of_async(run, samples.outcomes, timer),
            }
            break
        if gen_batches >= loop.dynamic_sampling_max_gen_batches:
            section = run.config.algorithm
            raise SamplingError(
                f"dynamic sampling found {len(run.batch_cache)} of the {loop.num_prompts_per_step} prompts of a step "
                f"in {section}.dynamic_sampling_max_gen_batches={gen_batches} generation batches: the samples of "
                f"nearly every prompt get the same reward; choose easier or harder prompts, more "
                f"{section}.num_generations_per_prompt, or a higher limit"
            )
    else:
        return None
    samples.engines = engine_figures(run.rollouts.take_engine_counts())
    return samples


def _recorded(run: SamplingRun, recorded: RecordedSteps, timer: StepTimer) -> StepSamples | None:
    """Read the samples of the next step, and the metrics of their sampling, from a recording; None: it has no more.

    Progress and the loader's position advance as they did in the recorded run.
    """
    state, loop = run.state, run.config.training_loop
    step = state["total_steps"] + 1
    if step not in recorded.files:
        return None
    with timer.phase("recording"):
        facts, groups = run.rollouts.load(recorded.files[step])
    run.make_check(groups, step).require_finite_samples()
    samples = StepSamples(groups=groups, dropped=facts.dropped, carried=facts.carried)
    samples.sampled = samples.outcomes[facts.carried * loop.num_generations_per_prompt :] + facts.dropped
    samples.metrics = dict(facts.dynamic_sampling) if loop.use_dynamic_sampling else {}
    recorded.load_state_dict(facts.position)
    run.batch_cache.clear()
    state["generation_batches"] += int(facts.dynamic_sampling.get(_GEN_BATCHES, 1))
    state["consumed_samples"] += len(samples.sampled) // loop.num_generations_per_prompt
    return samples


def _next_groups(run: SamplingRun, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> list[SampledGroup] | None:
    """The next generation batch, sampled now or taken from the sample buffer; None: no prompts are left."""
    state = run.state
    if run.buffer is not None:
        groups = run.buffer.take(batches, state["total_steps"], timer)
    else:
        prompts, loop = next(batches, None), run.config.training_loop
        rollout_settings = run.rollouts.make_settings(
            loop.num_generations_per_prompt, run.settings, loop.seed, step=state["generation_batches"] + 1
        )
        groups = None if prompts is None else run.rollouts.collect(prompts, rollout_settings, timer)
    if groups is None:
        return None
    state["generation_batches"] += 1
    state["consumed_samples"] += len(groups)
    run.make_check(groups, state["total_steps"] + 1).require_finite_samples()
    return groups


def _metrics_of_async(run: SamplingRun, outcomes: list[Outcome], timer: StepTimer) -> dict[str, float]:
    """Metrics of asynchronous sampling, about the samples that are trained on; empty for a synchronous run."""
    if run.buffer is None:
        return {}
    waited = sum(timer.seconds.get(phase, 0.0) for phase in ("generation", "environment"))
    ages = compute_age_metrics(outcomes, run.state["total_steps"])
    return {**ages, **run.buffer.metrics(), "exposed_generation_s": waited}


Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class DynamicBatch(Generic[Group]):
    """Result of dynamic sampling after one generation batch."""

    groups: list[Group]
    """Groups to train on, num_prompts_per_step of them; empty while the batch is not complete."""
    is_batch_complete: bool
    """Whether training can begin; otherwise further prompts have to be sampled."""
    batch_cache: list[Group]
    """Groups with a signal that wait for the rest of their step; empty when the batch is complete."""
    without_signal: int
    """Groups of this generation batch that were dropped because all their rewards are equal."""
    surplus: int
    """Groups with a signal that were cut off because the step was full without them."""


def dynamic_sampling(
    groups: Sequence[Group], signal: Tensor, *, num_prompts_per_step: int, batch_cache: Sequence[Group] = ()
) -> DynamicBatch[Group]:
    """Add the groups with a signal to the waiting ones, and decide whether they fill a step.

    Groups keep the order in which they were sampled. Surplus groups are not kept for the next step, because they were
    sampled from weights that are about to change.

    Args:
        groups: groups of one generation batch.
        signal: [groups], bool, see `has_signal`.
        num_prompts_per_step: groups that a step trains on.
        batch_cache: groups of earlier generation batches that wait for this step.
    """
    assert signal.shape == (len(groups),)
    assert signal.dtype == torch.bool
    useful = [*batch_cache, *(group for group, useful in zip(groups, signal.tolist(), strict=True) if useful)]
    complete = len(useful) >= num_prompts_per_step
    return DynamicBatch(
        groups=useful[:num_prompts_per_step] if complete else [],
        is_batch_complete=complete,
        batch_cache=[] if complete else useful,
        without_signal=int((~signal).sum()),
        surplus=max(0, len(useful) - num_prompts_per_step),
    )
