"""Metrics of a set of outcomes: reward, length, truncation, comparison within groups, rewards by function, age."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import islice
from statistics import fmean, stdev

import torch

from megatron_grpo.batch.figures import MAX_METRICS, is_environment_metric, make_step_metric_name
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.metric_names import TASK_METRICS


def compute_rollout_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Reward, accuracy and length statistics of a set of outcomes.

    reward and accuracy are means over the responses that have one, and are left out if none has.
    """
    rewards = [one.reward for one in outcomes if one.reward is not None]
    judged = [one.correct for one in outcomes if one.correct is not None]
    lengths = [float(outcome.response_tokens) for outcome in outcomes]
    return {
        **({"reward": fmean(rewards)} if rewards else {}),
        **({"accuracy": fmean(judged)} if judged else {}),
        "response_length": fmean(lengths),
        "response_length_max": max(lengths),
        "truncation_rate": fmean(outcome.truncated for outcome in outcomes),
        "weight_version": float(max(one.version for one in outcomes)),
    }


def compute_task_metrics(outcomes: Sequence[Outcome], tasks: Collection[str]) -> dict[str, float]:
    """task_reward/NAME, task_accuracy/NAME and task_response_length/NAME: means over the responses of one environment.

    Empty if `tasks`, the names of the run's environments, has only one name.
    """
    metrics: dict[str, float] = {}
    for task in tasks if len(tasks) > 1 else ():
        own = [one for one in outcomes if one.task_name == task]
        measured = compute_rollout_metrics(own) if own else {}
        metrics |= {f"task_{name}/{task}": measured[name] for name in TASK_METRICS if name in measured}
    return metrics


def compute_length_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Percentiles of the response length in tokens, linearly interpolated, and the share of untruncated responses."""
    lengths = torch.tensor([float(outcome.response_tokens) for outcome in outcomes])
    metrics = {f"response_length_p{p}": float(torch.quantile(lengths, p / 100)) for p in (50, 90, 99)}
    metrics["natural_termination_rate"] = fmean(not outcome.truncated for outcome in outcomes)
    return metrics


def compute_group_metrics(outcomes: Sequence[Outcome], samples_per_prompt: int) -> dict[str, float]:
    """Metrics that compare the samples of a prompt, which are neighbours in `outcomes`.

    Returns:
        reward_std: mean of the groups' standard deviations (divisor n - 1), as in TRL; with one sample per prompt, the
        standard deviation of all rewards. groups_all_wrong, groups_mixed and groups_all_right: shares of groups with
        no, some and only correct responses, among the groups whose responses are all judged; left out without such
        groups.
    """
    starts = range(0, len(outcomes), samples_per_prompt)
    groups = [outcomes[start : start + samples_per_prompt] for start in starts]
    by_group = [[one.reward for one in group if one.reward is not None] for group in groups]
    if samples_per_prompt == 1:
        by_group = [[reward for rewards in by_group for reward in rewards]]
    # stdev is exact but slow, so it is computed once per distinct multiset of rewards.
    known = {rewards: stdev(rewards) for rewards in {tuple(sorted(one)) for one in by_group if len(one) > 1}}
    deviations = [known[tuple(sorted(one))] for one in by_group if len(one) > 1]
    metrics = {"reward_std": fmean(deviations)} if deviations else {}
    judged = [group for group in groups if all(one.correct is not None for one in group)]
    right = [sum(bool(one.correct) for one in group) for group in judged]
    if not right:
        return metrics
    return metrics | {
        "groups_all_wrong": fmean(count == 0 for count in right),
        "groups_mixed": fmean(0 < count < samples_per_prompt for count in right),
        "groups_all_right": fmean(count == samples_per_prompt for count in right),
    }


def compute_reward_function_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """reward/NAME and reward_std/NAME: mean and standard deviation (divisor n - 1) of each function's rewards.

    With reward functions also unscored_rate, the share of responses that no function scored; with failures that
    env.NAME.on_reward_error=none ignores also reward_errors, their number. Figures that environments report are
    env/NAME or suspect/NAME, and means over the responses that have them; of very many, only the first MOST_FIGURES.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    reported: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, reward in outcome.reward_parts.items():
            values[name].append(reward)
        for name, figure in outcome.reward_metrics.items():
            reported[make_step_metric_name(name)].append(figure)
    unscored = fmean(outcome.is_unscored for outcome in outcomes)
    means = {f"reward/{name}": fmean(scored) for name, scored in values.items()}
    deviations = {f"reward_std/{name}": stdev(scored) if len(scored) > 1 else 0.0 for name, scored in values.items()}
    left_out = {*islice(filter(is_environment_metric, reported), MAX_METRICS, None)}
    figures = {name: fmean(values) for name, values in reported.items() if name not in left_out}
    errors = sum(outcome.reward_errors for outcome in outcomes)
    counted = {"reward_errors": float(errors)} if errors else {}
    return figures | means | deviations | counted | ({"unscored_rate": unscored} if values or unscored else {})


def compute_age_metrics(outcomes: Sequence[Outcome], version: int) -> dict[str, float]:
    """Age of trajectories when a step takes them, and number of weight versions from which each was sampled.

    Args:
        outcomes: outcomes that the step trains on; failed rollouts without a token do not count.
        version: version of the weights with which the step begins.

    Returns:
        trajectory_age and trajectory_age_max: steps since the weights of a trajectory's oldest token;
        trajectory_versions and trajectory_versions_max. All 0 without a token.
    """
    drawn = [one for one in outcomes if one.versions]
    ages = [float(version - one.oldest_version) for one in drawn] or [0.0]
    versions = [float(one.versions) for one in drawn] or [0.0]
    return {
        "trajectory_age": fmean(ages),
        "trajectory_age_max": max(ages),
        "trajectory_versions": fmean(versions),
        "trajectory_versions_max": max(versions),
    }
