"""Validation: metrics of a policy on held-out prompts, and early stopping from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_grpo.algorithms.context import EarlyStopState, SamplingRun
from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.batch.trajectory import Outcome, SampledGroup
from megatron_grpo.config.loop_schema import VALIDATION_METRICS, VALIDATION_PREFIX, EarlyStopConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.row_text import format_prompt
from megatron_grpo.observability.run_logger import make_sample_row
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.rollout_metrics import (
    compute_reward_function_metrics,
    compute_rollout_metrics,
    count_faults,
)


def validate(run: SamplingRun, timer: StepTimer | None = None) -> dict[str, float]:
    """Measure the engines' weights by a response to each validation prompt.

    Returns metrics of `compute_held_out_metrics` with the prefix val_; none without validation data.

    SamplingError: an engine or an environment failed, or a reward is not finite.
    """
    timer = StepTimer() if timer is None else timer
    held_out = run.measure_held_out(timer)
    if not run.val_prompts:
        return held_out
    run.refresh_engines(timer)
    run.placement.wake_engines(timer)
    # An asynchronous run has begun responses of the next step, whose figures must not count validation.
    run.counts_before_validation = run.take_engine_counts()
    loop = run.config.loop
    settings = replace(run.settings, temperature=loop.val_temperature)
    batches = sample_responses(
        run.rollouts, run.val_prompts, 1, settings, seed=loop.seed, size=loop.val_batch_size, timer=timer
    )
    groups = [group for batch in batches for group in batch]
    run.rollouts.take_engine_counts()
    run.make_check(groups, run.state["total_steps"], "validation").require_finite_samples()
    run.dumps.write_validation(run.state["total_steps"], groups, loop.val_period)
    printed_groups = groups[: run.config.logger.num_val_samples_to_print]
    answers = [group[0] for group in run.rollouts.fetch(printed_groups)]
    run.logger.show_samples(run.val_prompts, answers)
    if run.config.logger.log_completions:
        pairs = zip(run.val_prompts, answers, strict=False)
        rows = [make_sample_row(format_prompt(prompt), answer.to_row()) for prompt, answer in pairs]
        run.logger.log_table(run.state["total_steps"], "validation/completions", rows)
    metrics = compute_held_out_metrics(run.val_prompts, [group.outcomes for group in groups])
    return {**held_out, **{f"{VALIDATION_PREFIX}{name}": value for name, value in metrics.items()}}


def sample_responses(
    rollouts: RolloutPool,
    prompts: Sequence[DatumSpec],
    samples: int,
    settings: SamplingSettings,
    *,
    seed: int,
    size: int,
    timer: StepTimer,
) -> Iterator[list[SampledGroup]]:
    """Sample and score responses to all prompts, in batches of `size`."""
    for start in range(0, len(prompts), size):
        # Number 0 for every batch and validation: the same weights give the same responses for a seed.
        rollout_settings = rollouts.make_settings(samples, settings, seed, generation_batch=0)
        yield rollouts.collect(prompts[start : start + size], rollout_settings, timer)


def compute_held_out_metrics(prompts: Sequence[DatumSpec], outcomes: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """Compute the metrics of the responses to some prompts.

    accuracy, reward, response_length and truncation_rate, as far as they are known; failed_rollouts, if there are
    any, which reward and accuracy leave out; faulty_responses, if there are any; reward/NAME for each reward function;
    with several tasks, task_accuracy/TASK and so on by task; set_accuracy/NAME and so on for named sets.
    """
    all_outcomes = [outcome for group in outcomes for outcome in group]
    metrics = _select_metrics(all_outcomes)
    by_function = compute_reward_function_metrics(all_outcomes)
    metrics |= {name: value for name, value in by_function.items() if name.startswith("reward/")}
    by_task = _split_outcomes(outcomes, [prompt["task_name"] for prompt in prompts])
    for task, task_outcomes in by_task.items() if len(by_task) > 1 else ():
        metrics |= {f"task_{name}/{task}": value for name, value in _select_metrics(task_outcomes).items()}
    for dataset, set_outcomes in _split_outcomes(outcomes, [prompt.get("dataset") for prompt in prompts]).items():
        metrics |= {f"set_{name}/{dataset}": value for name, value in _select_metrics(set_outcomes).items()}
    return metrics


def _split_outcomes(outcomes: Sequence[Sequence[Outcome]], names: Sequence[str | None]) -> dict[str, list[Outcome]]:
    by_name: dict[str, list[Outcome]] = {name: [] for name in sorted({name for name in names if name is not None})}
    for name, group in zip(names, outcomes, strict=True):
        if name is not None:
            by_name[name] += group
    return by_name


def _select_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    metrics = compute_rollout_metrics(outcomes)
    failures = sum(outcome.failure is not None for outcome in outcomes)
    selected = {name: metrics[name] for name in VALIDATION_METRICS if name in metrics}
    return {**selected, **({"failed_rollouts": float(failures)} if failures else {}), **count_faults(outcomes)}


def update_early_stop(state: EarlyStopState, metrics: Mapping[str, float], config: EarlyStopConfig) -> None:
    """Update early stopping with a validation."""
    if not config.enabled or config.metric_name not in metrics:  # no response was scored
        return
    value = metrics[config.metric_name]
    sign = 1.0 if config.higher_is_better else -1.0
    has_improved = state["best"] is None or sign * (value - state["best"]) > config.min_delta
    if has_improved:
        state["best"] = value
    state["last"] = value
    state["waited"] = 0 if has_improved else state["waited"] + 1


def find_stop_reason(state: EarlyStopState, config: EarlyStopConfig) -> str | None:
    """Say why training ends early; None: training goes on."""
    if not config.enabled or state["last"] is None:
        return None
    name, last, threshold = config.metric_name, state["last"], config.threshold
    if threshold is not None and (last >= threshold if config.higher_is_better else last <= threshold):
        return f"{name} is {last:g}, which reaches early_stop.threshold={threshold:g}"
    if config.patience is not None and state["waited"] >= config.patience:
        return f"{name} has not improved on {state['best']:g} for {state['waited']} validations"
    return None
