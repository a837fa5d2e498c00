"""Metrics of a set of outcomes: rewards, lengths, comparison within groups, age."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import batched, islice
from statistics import fmean, stdev

import torch

from megatron_grpo.batch.environment_metrics import MAX_METRICS, is_environment_metric, make_step_metric_name
from megatron_grpo.batch.trajectory import SCORING_RETRIES, Outcome
from megatron_grpo.config.metric_names import TASK_METRICS
from megatron_grpo.rollouts.repeated_samples import REPEATED, find_copies


def compute_rollout_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Compute length statistics, and mean reward and accuracy of the responses that have one."""
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    correct = [outcome.correct for outcome in outcomes if outcome.correct is not None]
    lengths = [float(outcome.response_tokens) for outcome in outcomes]
    return {
        **({"reward": fmean(rewards)} if rewards else {}),
        **({"accuracy": fmean(correct)} if correct else {}),
        "response_length": fmean(lengths),
        "response_length_max": max(lengths),
        "truncation_rate": fmean(outcome.truncated for outcome in outcomes),
        "weight_version": float(max(outcome.version for outcome in outcomes)),
    }


def compute_task_metrics(outcomes: Sequence[Outcome], tasks: Collection[str]) -> dict[str, float]:
    """Compute task_reward/NAME, task_accuracy/NAME and task_response_length/NAME of several environments."""
    metrics: dict[str, float] = {}
    for task in tasks if len(tasks) > 1 else ():
        task_outcomes = [outcome for outcome in outcomes if outcome.task_name == task]
        task_metrics = compute_rollout_metrics(task_outcomes) if task_outcomes else {}
        metrics |= {f"task_{name}/{task}": task_metrics[name] for name in TASK_METRICS if name in task_metrics}
    return metrics


def compute_length_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Compute percentiles of response lengths (tokens, interpolated), and the untruncated share."""
    lengths = torch.tensor([float(outcome.response_tokens) for outcome in outcomes])
    metrics = {f"response_length_p{p}": float(torch.quantile(lengths, p / 100)) for p in (50, 90, 99)}
    metrics["natural_termination_rate"] = fmean(not outcome.truncated for outcome in outcomes)
    return metrics


def compute_group_metrics(outcomes: Sequence[Outcome], samples_per_prompt: int) -> dict[str, float]:
    """Compare the samples of a prompt, neighbours in `outcomes`.

    reward_std is the mean of the groups' standard deviations (divisor n - 1), as in TRL; with one sample per prompt,
    the standard deviation of all rewards. groups_all_wrong, groups_mixed and groups_all_right are shares of the groups
    whose responses are all judged, and left out without such groups.
    """
    groups = list(batched(outcomes, samples_per_prompt))
    by_group = [[outcome.reward for outcome in group if outcome.reward is not None] for group in groups]
    if samples_per_prompt == 1:
        by_group = [[reward for rewards in by_group for reward in rewards]]
    # stdev is exact but slow, so it is computed once per distinct multiset of rewards.
    multisets = [tuple(sorted(rewards)) for rewards in by_group if len(rewards) > 1]
    deviation_of = {rewards: stdev(rewards) for rewards in set(multisets)}
    deviations = [deviation_of[rewards] for rewards in multisets]
    metrics = {"reward_std": fmean(deviations)} if deviations else {}
    judged = [group for group in groups if all(outcome.correct is not None for outcome in group)]
    counts = [sum(bool(outcome.correct) for outcome in group) for group in judged]
    if not counts:
        return metrics
    return metrics | {
        "groups_all_wrong": fmean(count == 0 for count in counts),
        "groups_mixed": fmean(0 < count < samples_per_prompt for count in counts),
        "groups_all_right": fmean(count == samples_per_prompt for count in counts),
    }


def compute_reward_function_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Compute each reward function's mean and deviation, and reported figures.

    The deviation has the divisor n - 1. With reward functions also unscored_rate, the share of responses that no
    function scored; with failures that env.NAME.on_reward_error=none ignores also reward_errors, their number; with
    copies among the samples also repeated_samples, their share. scoring_retries is the number of calls that failed and
    were repeated for their group. Figures that environments report are means over the responses that have them; of very
    many, only the first MAX_METRICS.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    reported: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, reward in outcome.reward_parts.items():
            values[name].append(reward)
        for name, figure in outcome.reward_metrics.items():
            if name != REPEATED:
                reported[make_step_metric_name(name)].append(figure)
    unscored = fmean(outcome.is_unscored for outcome in outcomes)
    means = {f"reward/{name}": fmean(scored) for name, scored in values.items()}
    deviations = {f"reward_std/{name}": stdev(scored) if len(scored) > 1 else 0.0 for name, scored in values.items()}
    omitted = {*islice(filter(is_environment_metric, reported), MAX_METRICS, None)}
    retries = reported.pop(SCORING_RETRIES, [])
    figures = {name: fmean(values) for name, values in reported.items() if name not in omitted}
    errors = sum(outcome.reward_errors for outcome in outcomes)
    counted = {"reward_errors": float(errors)} if errors else {}
    if copies := find_copies(outcomes):
        counted["repeated_samples"] = len(copies) / len(outcomes)
    counted |= {SCORING_RETRIES: sum(retries)} if retries else {}
    return figures | means | deviations | counted | ({"unscored_rate": unscored} if values or unscored else {})


def count_faults(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Count the responses that failed by their own text, if any."""
    faulty = sum(outcome.fault is not None for outcome in outcomes)
    return {"faulty_responses": float(faulty)} if faulty else {}


def compute_age_metrics(outcomes: Sequence[Outcome], version: int) -> dict[str, float]:
    """Compute trajectories' ages and numbers of weight versions; 0 without a token.

    The age is in steps from the weights of a trajectory's oldest token to `version`, with which the step begins.
    """
    sampled = [outcome for outcome in outcomes if outcome.versions]
    ages = [float(version - outcome.oldest_version) for outcome in sampled] or [0.0]
    versions = [float(outcome.versions) for outcome in sampled] or [0.0]
    return {
        "trajectory_age": fmean(ages),
        "trajectory_age_max": max(ages),
        "trajectory_versions": fmean(versions),
        "trajectory_versions_max": max(versions),
    }
