"""The rollouts that a step trains on: one generation batch, or as many as dynamic sampling takes to fill the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.algorithms.scoring import Scores, dynamic_sampling, score
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.controller.context import SampleSource
from megatron_grpo.controller.recordings import RecordedSteps
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.responses import engine_figures
from megatron_grpo.data.rollout_files import StepFacts
from megatron_grpo.data.trajectory import Outcome, SampledGroup, renumbered
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.sampler.metrics import age_metrics

_DYNAMIC_SAMPLING = "dynamic_sampling_"
_GEN_BATCHES = f"{_DYNAMIC_SAMPLING}gen_batches"


@dataclass(slots=True)
class StepSamples:
    """What was sampled for a step."""

    groups: list[SampledGroup] = field(default_factory=list)
    """Groups to train on, numbered by their place in the step."""
    scores: Scores | None = None
    """Scores of the groups to train on, where dynamic sampling needed them; None: not computed yet."""
    sampled: list[Outcome] = field(default_factory=list)
    """Everything that was sampled, also what dynamic sampling dropped."""
    metrics: dict[str, float] = field(default_factory=dict)
    engines: dict[str, float] = field(default_factory=dict)
    """How busy the engines were, which depends on the clock."""
    dropped: list[Outcome] = field(default_factory=list)
    """What dynamic sampling dropped of it."""
    carried: int = 0
    """The first groups to train on: they were sampled before the run was resumed, and are not in `sampled`."""

    def facts(self, position: dict[str, Any]) -> StepFacts:
        """What a recording says of the step beside the rollouts; `position`: the loader's state after it."""
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


def sample(source: SampleSource, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    """Sample the groups of the next step, or read them from a recording; None: the data, or the recording, is used up.

    What dynamic sampling has by then stays in source.waiting, for a run that is continued with more epochs.

    Raises:
        SamplingError: an engine failed, too many rollouts did, a reward is not finite, or dynamic sampling did not
            fill the step within its limit.
        RunError: a sampling log-probability is not finite.
    """
    if source.recorded is not None:
        return _recorded(source, source.recorded, timer)
    samples = _sampled(source, batches, timer)
    if samples is not None:
        samples.engines = engine_figures(source.rollouts.take_engine_counts())
    return samples


def _sampled(source: SampleSource, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    """As `sample`, without the figures of the engines."""
    samples, loop = StepSamples(carried=len(source.waiting)), source.config.loop
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
        selected = dynamic_sampling(
            groups, scores.kept, num_prompts_per_step=loop.num_prompts_per_step, batch_cache=source.waiting
        )
        source.waiting[:] = selected.batch_cache
        without_signal += selected.without_signal
        surplus += selected.surplus
        kept = {id(group) for group in (*selected.groups, *selected.batch_cache)}
        samples.dropped += [one for group in groups if id(group) not in kept for one in group.outcomes]
        if selected.is_batch_complete:
            of_groups = [known.get(id(group)) or score(source.config, group.outcomes) for group in selected.groups]
            samples.groups, samples.scores = renumbered(selected.groups), Scores.joined(of_groups)
            samples.metrics = {
                _GEN_BATCHES: float(gen_batches),
                "dynamic_sampling_groups_without_signal": float(without_signal),
                "dynamic_sampling_groups_sliced": float(surplus),
                **_metrics_of_async(source, samples.outcomes, timer),
            }
            return samples
        _require_within_limit(source, gen_batches)
    return None


def _recorded(source: SampleSource, recorded: RecordedSteps, timer: StepTimer) -> StepSamples | None:
    """The samples of the next step as an earlier run sampled them, with its metrics of sampling; None: it made no more.

    Progress and the loader's position become those of that run after the step.

    Raises:
        SamplingError: a reward is not finite.
        RunError: the rollouts cannot be read, or a sampling log-probability is not finite.
    """
    state, loop = source.state, source.config.loop
    step = state["total_steps"] + 1
    if step not in recorded.files:
        return None
    with timer.phase("recording"):
        facts, groups = source.rollouts.tokens.load(recorded.files[step])
    source.guard.require_finite_samples(groups, step)
    samples = StepSamples(groups=groups, dropped=facts.dropped, carried=facts.carried)
    samples.sampled = samples.outcomes[facts.carried * loop.num_generations_per_prompt :] + facts.dropped
    samples.metrics = dict(facts.dynamic_sampling) if loop.use_dynamic_sampling else {}
    recorded.load_state_dict(facts.position)
    source.waiting.clear()
    state["generation_batches"] += int(facts.dynamic_sampling.get(_GEN_BATCHES, 1))
    state["consumed_samples"] += len(samples.sampled) // loop.num_generations_per_prompt
    return samples


def _next_groups(
    source: SampleSource, batches: Iterator[list[DatumSpec]], timer: StepTimer
) -> list[SampledGroup] | None:
    """The next generation batch, sampled now or ahead; None: no prompts are left."""
    state = source.state
    if source.buffer is not None:
        groups = source.buffer.take(batches, state["total_steps"], timer)
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
    if source.buffer is None:
        return {}
    waited = sum(timer.seconds.get(phase, 0.0) for phase in ("generation", "environment"))
    ages = age_metrics(outcomes, source.state["total_steps"])
    return {**ages, **source.buffer.metrics(), "exposed_generation_s": waited}


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
