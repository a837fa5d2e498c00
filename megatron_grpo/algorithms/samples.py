"""The rollouts that a step trains on: one generation batch, or as many as dynamic sampling takes to fill the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_grpo.algorithms.dynamic_sampling import dynamic_sampling
from megatron_grpo.algorithms.scoring import Scores, score
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.engine_counts import engine_figures
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.trajectory import Outcome, SampledGroup, renumbered
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.rollouts.metrics import age_metrics
from megatron_grpo.run.sample_source import SampleSource


@dataclass(slots=True)
class StepSamples:
    """What was sampled for a step."""

    groups: list[SampledGroup] = field(default_factory=list)
    """Groups to train on, numbered by their place in the step."""
    scores: Scores | None = None
    """Scores of the groups to train on, where dynamic sampling asked for them; None: nobody did yet."""
    sampled: list[Outcome] = field(default_factory=list)
    """Everything that was sampled, also what dynamic sampling dropped."""
    metrics: dict[str, float] = field(default_factory=dict)
    engines: dict[str, float] = field(default_factory=dict)
    """How busy the engines were, which depends on the clock."""

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes of the rollouts that are trained on; the samples of a prompt are neighbours."""
        return [outcome for group in self.groups for outcome in group.outcomes]


def sample(source: SampleSource, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    """Sample the groups of the next step; None: the data is used up.

    What dynamic sampling has by then stays in source.waiting, for a run that is continued with more epochs.

    Raises:
        SamplingError: an engine failed, too many rollouts did, a reward is not finite, or dynamic sampling did not
            fill the step within its limit.
        RunError: a sampling log-probability is not finite.
    """
    samples = _sampled(source, batches, timer)
    if samples is not None:
        samples.engines = engine_figures(source.rollouts.take_engine_counts())
    return samples


def _sampled(source: SampleSource, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    """As `sample`, without the figures of the engines."""
    samples, loop = StepSamples(), source.config.loop
    without_signal = surplus = gen_batches = 0
    known: dict[int, Scores] = {}
    while groups := _next_groups(source, batches, timer):
        gen_batches += 1
        outcomes = [outcome for group in groups for outcome in group.outcomes]
        samples.sampled += outcomes
        if not loop.use_dynamic_sampling:
            samples.groups, samples.metrics = groups, _metrics_of_async(source, outcomes, timer)
            return samples
        scores = score(source.config, outcomes)
        known |= {id(group): scores.of_groups([number]) for number, group in enumerate(groups)}
        outcome = dynamic_sampling(
            groups, scores.kept, num_prompts_per_step=loop.num_prompts_per_step, batch_cache=source.waiting
        )
        source.waiting[:] = outcome.batch_cache
        without_signal += outcome.without_signal
        surplus += outcome.surplus
        if outcome.is_batch_complete:
            of_groups = [known.get(id(group)) or score(source.config, group.outcomes) for group in outcome.groups]
            samples.groups, samples.scores = renumbered(outcome.groups), Scores.joined(of_groups)
            samples.metrics = {
                "dynamic_sampling_gen_batches": float(gen_batches),
                "dynamic_sampling_groups_without_signal": float(without_signal),
                "dynamic_sampling_groups_sliced": float(surplus),
                **_metrics_of_async(source, samples.outcomes, timer),
            }
            return samples
        _require_within_limit(source, gen_batches)
    return None


def _next_groups(
    source: SampleSource, batches: Iterator[list[DatumSpec]], timer: StepTimer
) -> list[SampledGroup] | None:
    """The next generation batch, sampled now or ahead; None: no prompts are left."""
    state = source.state
    if source.ahead is not None:
        groups = source.ahead.take(batches, state["total_steps"], timer)
    else:
        groups = _sampled_now(source, batches, timer)
    if groups is None:
        return None
    state["generation_batches"] += 1
    state["consumed_samples"] += len(groups)
    source.guard.require_finite_samples(groups, state["total_steps"] + 1)
    return groups


def _sampled_now(
    source: SampleSource, batches: Iterator[list[DatumSpec]], timer: StepTimer
) -> list[SampledGroup] | None:
    prompts = next(batches, None)
    if prompts is None:
        return None
    return source.rollouts.collect(
        prompts,
        samples_per_prompt=source.config.loop.num_generations_per_prompt,
        settings=source.settings,
        run_seed=source.config.loop.seed,
        step=source.state["generation_batches"] + 1,
        timer=timer,
    )


def _metrics_of_async(source: SampleSource, outcomes: list[Outcome], timer: StepTimer) -> dict[str, float]:
    """About samples that were drawn ahead, of which these are trained on; nothing where none are."""
    if source.ahead is None:
        return {}
    waited = sum(timer.seconds.get(phase, 0.0) for phase in ("generation", "environment"))
    ages = age_metrics(outcomes, source.state["total_steps"])
    return {**ages, **source.ahead.metrics(), "exposed_generation_s": waited}


def _require_within_limit(source: SampleSource, gen_batches: int) -> None:
    loop, section = source.config.loop, source.config.algorithm
    limit = loop.dynamic_sampling_max_gen_batches
    if gen_batches >= limit:
        raise SamplingError(
            f"dynamic sampling found {len(source.waiting)} of the {loop.num_prompts_per_step} prompts of a step in "
            f"{section}.dynamic_sampling_max_gen_batches={limit} generation batches: the samples of nearly every "
            f"prompt get the same reward; choose easier or harder prompts, more {section}.num_generations_per_prompt, "
            "or a higher limit"
        )
