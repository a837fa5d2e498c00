"""The responses that a step trains on: one generation batch, or as many as dynamic sampling takes to fill the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_grpo.algorithms.dynamic_sampling import dynamic_sampling
from megatron_grpo.algorithms.step_advantages import groups_with_signal
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.run.context import GRPORun
from megatron_grpo.run.non_finite import require_finite_samples

Group = list[Trajectory]
"""The samples of one prompt."""


@dataclass(slots=True)
class StepSamples:
    """What was sampled for a step."""

    trajectories: list[Trajectory] = field(default_factory=list)
    """To train on; the samples of a prompt are neighbours."""
    sampled: list[Trajectory] = field(default_factory=list)
    """Everything that was sampled, also what dynamic sampling dropped."""
    metrics: dict[str, float] = field(default_factory=dict)


def sample_step(run: GRPORun, batches: Iterator[list[DatumSpec]], timer: StepTimer) -> StepSamples | None:
    """Sample the groups of the next step; None: the data is used up.

    What dynamic sampling has by then stays in run.batch_cache, for a run that is continued with more epochs.

    Raises:
        SamplingError: an engine or an environment failed, a reward is not finite, or dynamic sampling did not fill the
            step within its limit.
        RunError: a sampling log-probability is not finite.
    """
    step, dynamic = StepSamples(), run.config.loop.use_dynamic_sampling
    without_signal = surplus = gen_batches = 0
    while prompts := next(batches, None):
        gen_batches += 1
        trajectories = _sample(run, prompts, timer)
        step.sampled += trajectories
        if not dynamic:
            step.trajectories = step.sampled
            return step
        outcome = dynamic_sampling(
            _groups(trajectories, run.config.loop.num_generations_per_prompt),
            groups_with_signal(run.config, trajectories),
            num_prompts_per_step=run.config.loop.num_prompts_per_step,
            batch_cache=run.batch_cache,
        )
        run.batch_cache = outcome.batch_cache
        without_signal += outcome.without_signal
        surplus += outcome.surplus
        if outcome.is_batch_complete:
            step.trajectories = _renumbered(outcome.groups)
            step.metrics = {
                "dynamic_sampling_gen_batches": float(gen_batches),
                "dynamic_sampling_groups_without_signal": float(without_signal),
                "dynamic_sampling_groups_sliced": float(surplus),
            }
            return step
        _require_within_limit(run, gen_batches)
    return None


def _sample(run: GRPORun, prompts: list[DatumSpec], timer: StepTimer) -> list[Trajectory]:
    run.state["generation_batches"] += 1
    run.state["consumed_samples"] += len(prompts)
    trajectories = run.collector.collect(
        prompts,
        samples_per_prompt=run.config.loop.num_generations_per_prompt,
        settings=run.sampling,
        run_seed=run.config.loop.seed,
        step=run.state["generation_batches"],
        timer=timer,
    )
    require_finite_samples(trajectories, run.logger.run_dir, run.state["total_steps"] + 1)
    unscored = [trajectory for trajectory in trajectories if trajectory.reward is None]
    if unscored:
        prompt = unscored[0].prompt_idx
        run.logger.note_once(
            "unscored",
            f"no reward function gave a reward for {len(unscored)} of {len(trajectories)} responses (row {prompt} of "
            "data.train_path for one): they are left out of baselines and loss; unscored_rate counts them",
        )
    return trajectories


def _groups(trajectories: list[Trajectory], samples: int) -> list[Group]:
    return [trajectories[start : start + samples] for start in range(0, len(trajectories), samples)]


def _renumbered(groups: list[Group]) -> list[Trajectory]:
    """The groups end to end, numbered by their place in the step: they come from several generation batches."""
    return [replace(trajectory, group=number) for number, group in enumerate(groups) for trajectory in group]


def _require_within_limit(run: GRPORun, gen_batches: int) -> None:
    limit, section = run.config.loop.dynamic_sampling_max_gen_batches, run.config.algorithm
    if gen_batches >= limit:
        raise SamplingError(
            f"dynamic sampling found {len(run.batch_cache)} of the {run.config.loop.num_prompts_per_step} prompts of a "
            f"step in {section}.dynamic_sampling_max_gen_batches={limit} generation batches: the samples of nearly "
            f"every prompt get the same reward; choose easier or harder prompts, more "
            f"{section}.num_generations_per_prompt, or a higher limit"
        )
