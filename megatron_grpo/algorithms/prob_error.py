"""Warns when training and generation disagree more than noise explains, and refuses to learn beyond a limit.

The figure is token_mult_prob_error, the mean over a step's tokens of exp(|training - generation|): 1 when both give the
sampled tokens the same probabilities. Its excess over 1 should be rounding noise. The first steps of a run measure this
noise and stay the reference, so an error that grows slowly is noticed too. Bounds by precision apply until then, so a
run that is wrong from its first step is noticed; and no later bound is below a floor by precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NoReturn

from megatron_grpo.algorithms.context import EpisodeState, GRPORun, ProbErrorState
from megatron_grpo.algorithms.records import StepCheck
from megatron_grpo.algorithms.token_functions import measure_prob_error
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.errors import DisagreementError
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.losses.divergence import error_without_worst
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.rollout_metrics import compute_age_metrics
from megatron_grpo.weight_sync.refit_checks import find_coarsest_precision

ERROR = "token_mult_prob_error"
WORST = "token_mult_prob_error_max"
BOUND = "token_mult_prob_error_bound"
IS_OFF = "token_mult_prob_error_off"
DIVERGENCE = "gen_kl_error"
DIVERGENCE_BOUND = "gen_kl_error_bound"

# Fresh tokens, drawn from the weights that train: the bound is a multiple of the median excess of the first steps.
MEASURED_STEPS = 5
MARGIN = 3.0

# Older tokens (asynchronous runs) also differ by what the policy has learnt since. Rounding is nothing beside that, and
# the exponential of such differences has a tail that jumps by a factor of ten from step to step in healthy runs. So
# steps with such tokens are assessed by gen_kl_error, which is steady, against a multiple of the median of the latest
# such steps, in nats, since the change of a step depends on the learning rate.
LATEST_STEPS = 20
STALE_MARGIN = 4.0
STALE_FIRST = 1.0  # the bound until such steps are measured
STALE_FLOOR = 0.05  # the smallest bound, for each update that the tokens are behind


@dataclass(frozen=True, slots=True)
class NoiseBounds:
    """How far rounding may move the probability error above 1 (docs/observing.md)."""

    first: float  # before the noise is measured
    floor: float  # afterwards the smallest bound, since noise changes with the policy

    @staticmethod
    def from_config(config: Config, shape: ModelShape) -> NoiseBounds:
        """Choose the bounds of a run."""
        if config.generation.has_unmatched_sampling:
            return NoiseBounds(math.inf, 0.25)
        precision = find_coarsest_precision(config)
        if precision == "8 bits":
            return NoiseBounds(0.5, 0.25)
        # A near tie of scores sends a token to another expert on one side, unless the experts are replayed.
        routing_factor = 3.0 if shape.experts is not None and not config.policy.moe.replay_routing else 1.0
        if precision in ("float32", "tf32"):
            return NoiseBounds((1e-3 if precision == "float32" else 5e-3) * routing_factor, 1e-4 * routing_factor)
        # Errors of layers that round independently add up as in a random walk; measured with 8 layers.
        first = min(0.1, 0.03 * math.sqrt(shape.layers / 8))
        return NoiseBounds(first * routing_factor, first * routing_factor / 2)


@dataclass(frozen=True, slots=True)
class NoiseComparison:
    """One step compared with the noise so far."""

    figure: str  # the metric that was compared: ERROR or DIVERGENCE
    bound: float  # its largest value that noise explains; infinite while that is not known
    is_off: bool
    ratio: float  # of the figure to the bound, each as its excess over what exact agreement gives; infinite for NaN

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics about the comparison."""
        name = BOUND if self.figure == ERROR else DIVERGENCE_BOUND
        return {**({name: self.bound} if math.isfinite(self.bound) else {}), IS_OFF: float(self.is_off)}


def compare_with_noise(
    state: ProbErrorState, bounds: NoiseBounds, metrics: Mapping[str, float], age: int, limit: float | None
) -> NoiseComparison:
    """Compare a step with the noise so far.

    Args:
        state: the noise, which is updated.
        metrics: the step's metrics, with ERROR, WORST, DIVERGENCE and valid_tokens.
        age: updates between the weights that drew the oldest token and those that train on it.
        limit: hard limit of the error; a step whose error exceeds it only by its worst token is off as well.
    """
    if age > 0:
        memory, keep, value = state["stale"], LATEST_STEPS, metrics[DIVERGENCE]
        bound = max(STALE_FLOOR * age, STALE_MARGIN * median(memory)) if len(memory) >= MEASURED_STEPS else STALE_FIRST
    else:
        memory, keep = state["fresh"], MEASURED_STEPS
        value = error_without_worst(metrics[ERROR], metrics[WORST], metrics["valid_tokens"]) - 1.0
        bound = max(bounds.floor, MARGIN * median(memory)) if len(memory) >= MEASURED_STEPS else bounds.first
    is_off = not value <= bound or (limit is not None and metrics[ERROR] > limit)  # NaN is off
    if not is_off and (age > 0 or len(memory) < keep):
        memory.append(max(value, 0.0))
        del memory[:-keep]
    ratio = math.inf if math.isnan(value) else value / bound
    figure, bound = (DIVERGENCE, bound) if age > 0 else (ERROR, 1.0 + bound)
    return NoiseComparison(figure, bound, is_off, ratio)


@dataclass(frozen=True, slots=True)
class Assessment:
    """Part of a step's report about its probability error."""

    metrics: Mapping[str, float]
    remarks: Sequence[str] = ()
    needs_checkpoint: bool = False  # True: a checkpoint after the step lets the doctor examine the next one


def assess_agreement(run: GRPORun, step: int, metrics: Mapping[str, float], outcomes: Sequence[Outcome]) -> Assessment:
    """Compare the error of a step with the run's noise, and update the noise.

    If an episode begins or becomes far worse, the refit of this step makes both checks of weights (canary, all
    weights), if enabled. A step without an optimizer step has no error in `metrics`, and is not compared.
    """
    config, state, remarks = run.config, run.state.get("prob_error"), []
    penalties = " with penalties or a form" if config.generation.has_unmatched_sampling else ""
    precision = f"{find_coarsest_precision(config)}{penalties}"  # noise of another precision is no reference
    if state is None or state["precision"] != precision:
        if run.state["total_steps"]:  # the first step of a run needs no remark
            measured = f"the checkpoint's was measured in {state['precision']}" if state else "the checkpoint has none"
            remarks.append(f"the noise of {ERROR} is measured from this step on, since {measured}")
        state = ProbErrorState(precision=precision, fresh=[], stale=[], episode=None, episodes=0)
        run.state["prob_error"] = state
    if ERROR not in metrics:
        return Assessment({}, remarks)
    age = compute_oldest_age(run, outcomes)
    bounds = NoiseBounds.from_config(config, run.policy.shape)
    comparison = compare_with_noise(state, bounds, metrics, age, find_prob_error_limit(config, age))
    if not config.needs_generation:  # recorded tokens may come from other weights on purpose
        return Assessment(comparison.metrics, remarks)
    change = follow_episode(state, step, metrics[ERROR], comparison.ratio if comparison.is_off else None)
    if change is None:
        return Assessment(comparison.metrics, remarks)
    if change.kind == "end":
        remarks.append(f"training and generation agree again: {change.text}")
        return Assessment(comparison.metrics, remarks)
    if run.transport is not None:
        run.transport.require_checks()
    # The doctor examines a step from the checkpoint before it; the first one has the model folder.
    needs_checkpoint = not (step == 1 or step - 1 in run.checkpointer.list_steps()) and change.deserves_checkpoint
    needs_checkpoint &= config.has_checkpoints
    remarks.append(_describe_disagreement(run, step, metrics, comparison, change, needs_checkpoint))
    return Assessment(comparison.metrics, remarks, needs_checkpoint)


def compute_oldest_age(run: GRPORun, outcomes: Sequence[Outcome]) -> int:
    """Count the updates since the oldest token of a step was drawn."""
    return int(compute_age_metrics(outcomes, run.state["total_steps"])["trajectory_age_max"])


def _describe_disagreement(
    run: GRPORun,
    step: int,
    metrics: Mapping[str, float],
    comparison: NoiseComparison,
    change: EpisodeChange,
    needs_checkpoint: bool,
) -> str:
    refit = run.config.refit
    advice = f"{_make_doctor_command(run.run_dir, step)} names the reason"
    if needs_checkpoint:
        command = _make_doctor_command(run.run_dir, step + 1)
        advice = f"a checkpoint is saved after this step, so that {command} names the reason once the next step is done"
    checks = [*(["the canary"] if refit.canary else []), *(["all weights"] if refit.weight_check_period else [])]
    compared = f" This step's refit compares {' and '.join(checks)}." if checks and run.transport is not None else ""
    divergence = f", {DIVERGENCE} {metrics[DIVERGENCE]:.6g}" if comparison.figure == DIVERGENCE else ""
    figures = (
        f"{ERROR} is {metrics[ERROR]:.6g} (largest of a token: {metrics[WORST]:.6g}){divergence}, and "
        f"{comparison.figure} up to {comparison.bound:.6g} would be noise"
    )
    if change.kind == "worse":
        return f"training and generation disagree far more than before: {figures}. {change.text}.{compared} {advice}"
    return (
        f"training and generation disagree more than noise explains{change.text}: {figures}.{compared} {advice}. "
        "refit.canary_share=1 and refit.weight_check_period=1 compare engines with the policy in every refit; "
        "refit.prob_error_limit ends the run before it learns from such a step. The metric "
        f"{IS_OFF} marks further such steps; another message comes when they become far worse, and after "
        f"{CALM_STEPS} steps within the bound"
    )


def find_prob_error_limit(config: Config, age: int) -> float | None:
    """Find the largest token_mult_prob_error of a step that training accepts; None: any.

    `age` counts updates between the weights that drew the oldest token and the weights that train on it.
    """
    limit = config.refit.prob_error_limit
    # The default is for tokens that both sides compute in the same way from the same weights.
    is_comparable = age == 0 and not config.generation.has_unmatched_sampling
    is_default = limit == RefitConfig().prob_error_limit
    return limit if config.needs_generation and (is_comparable or not is_default) else None


def require_agreement(
    config: Config, batch: StepBatch, rollouts: RolloutPool, check: StepCheck, timer: StepTimer
) -> None:
    """Refuse a step whose prev_logprobs are beyond the hard limit (`refuse_step`)."""
    # Without prev_logprobs the ranks check their own, before the only optimizer step (`ModelRank.is_beyond_limit`).
    limit, tokens = batch.prob_error_limit, float(batch.loss_tokens)
    if limit is None or "prev_logprobs" not in batch.fields or not tokens:
        return
    fields = ("sampled", "prev_logprobs", "generation_logprobs")
    with timer.phase("logprobs"):
        error, worst = rollouts.compute(measure_prob_error, batch, fields, batch.in_loss)
    if error_without_worst(error, worst, tokens) > limit:
        refuse_step(config, batch, check, {ERROR: error, WORST: worst})


def refuse_step(config: Config, batch: StepBatch, check: StepCheck, metrics: Mapping[str, float]) -> NoReturn:
    """End the run before it learns from a step: DisagreementError."""
    limit, step = batch.prob_error_limit, check.step
    assert limit is not None
    is_recorded = config.logger.rollouts == "all"
    rollouts = "its rollouts are recorded" if is_recorded else "logger.rollouts=all records rollouts"
    text = (
        f"step {step}: {ERROR} is {metrics[ERROR]:.6g} (largest of a token: {metrics[WORST]:.6g}), more than "
        f"refit.prob_error_limit={limit:g}: training and generation disagree about the probabilities of the sampled "
        f"tokens. Nothing was learnt from the step, and {rollouts}. {_make_doctor_command(check.run_dir, step)} names "
        "the reason; refit.prob_error_limit=null learns all the same"
    )
    figures = {BOUND: limit, IS_OFF: 1.0, "optimizer_steps": 0.0, "valid_tokens": float(batch.loss_tokens)}
    raise DisagreementError(text, {**metrics, **figures})


def _make_doctor_command(run_dir: Path, step: int) -> str:
    return f"python -m megatron_grpo.doctor {run_dir} step={step}"


# Steps in a row within the bound that end an episode. Few, so that a fault which comes and goes is reported each time.
CALM_STEPS = 3

# An episode is far worse when a step is this many times as far beyond its bound as the last one that was reported.
# So an error that grows without end is reported once for each power of ten.
FAR_WORSE = 10.0

# Episodes of a run after which a checkpoint is saved. A fault that comes and goes would otherwise write one every few
# steps.
CHECKPOINTED_EPISODES = 3


@dataclass(frozen=True, slots=True)
class EpisodeChange:
    """A change of the episode that a step makes, to be reported."""

    kind: Literal["begin", "worse", "end"]
    text: str  # part of the message about the episode
    deserves_checkpoint: bool = False


def follow_episode(state: ProbErrorState, step: int, error: float, ratio: float | None) -> EpisodeChange | None:
    """Update the episode by a step; returns its change, if any.

    Args:
        state: the episode so far, which is updated.
        step: number of the step.
        error: its token_mult_prob_error.
        ratio: its excess relative to the bound; None: the step is within its bound.
    """
    episode = state.get("episode")  # checkpoints of earlier releases have none
    if ratio is None:
        return None if episode is None else _count_calm_step(state, episode)
    ratio = max(ratio, 1.0)  # a single token may be past the hard limit in a step that is within its bound
    if episode is None:
        number = state.get("episodes", 0) + 1
        state["episodes"] = number
        state["episode"] = EpisodeState(
            first_step=step, last_step=step, steps=1, calm_steps=0, worst_error=error, reported_ratio=ratio
        )
        text = f" (episode {number} of this run)" if number > 1 else ""
        return EpisodeChange("begin", text, deserves_checkpoint=number <= CHECKPOINTED_EPISODES)
    # A number that is not finite stays the worst: a comparison with NaN is false.
    if not error <= episode["worst_error"]:
        episode["worst_error"] = error
    episode["last_step"], episode["steps"], episode["calm_steps"] = step, episode["steps"] + 1, 0
    times = ratio / episode["reported_ratio"]
    if not times >= FAR_WORSE:  # NaN: both are infinite
        return None
    episode["reported_ratio"] = ratio
    text = f"That is {times:.3g} times as far beyond the bound as reported of the episode that began with step"
    return EpisodeChange("worse", f"{text} {episode['first_step']}")


def _count_calm_step(state: ProbErrorState, episode: EpisodeState) -> EpisodeChange | None:
    episode["calm_steps"] += 1
    if episode["calm_steps"] < CALM_STEPS:
        return None
    state["episode"] = None
    first, last, count = episode["first_step"], episode["last_step"], episode["steps"]
    steps = f"step {first} was" if first == last else f"{count} of the steps {first} to {last} were"
    error = f"token_mult_prob_error was at most {episode['worst_error']:.6g}"
    return EpisodeChange("end", f"{steps} beyond the bound ({error}), and the last {CALM_STEPS} steps are within it")
