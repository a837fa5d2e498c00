"""Numbers about a set of trajectories: lengths, how they ended, outcomes by group, rewards by function."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

import torch

from megatron_grpo.rollouts.trajectory import Trajectory

PERCENTILES = (50, 90, 99)


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Percentiles of the response length in tokens, linearly interpolated, and how many ended by themselves."""
    lengths = torch.tensor([float(trajectory.response_tokens) for trajectory in trajectories])
    metrics = {f"response_length_p{p}": float(torch.quantile(lengths, p / 100)) for p in PERCENTILES}
    metrics["natural_termination_rate"] = fmean(not trajectory.truncated for trajectory in trajectories)
    return metrics


def outcome_metrics(trajectories: Sequence[Trajectory], samples_per_prompt: int) -> dict[str, float]:
    """Shares of groups with no, some and only correct responses. Samples of a group are neighbours."""
    right = torch.tensor([trajectory.correct for trajectory in trajectories]).view(-1, samples_per_prompt).sum(dim=1)
    wrong, all_right = right == 0, right == samples_per_prompt
    return {
        "groups_all_wrong": float(wrong.float().mean()),
        "groups_mixed": float((~wrong & ~all_right).float().mean()),
        "groups_all_right": float(all_right.float().mean()),
    }


def reward_function_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """reward/NAME and reward_std/NAME: mean and standard deviation over the responses that the function scored."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, reward in trajectory.reward_parts.items():
            values.setdefault(name, []).append(reward)
    means = {f"reward/{name}": fmean(scored) for name, scored in values.items()}
    return means | {f"reward_std/{name}": pstdev(scored) for name, scored in values.items()}
