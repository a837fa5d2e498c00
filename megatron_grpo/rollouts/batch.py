"""From scored trajectories to the tensors that the policy trains on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory


def rewards_by_group(trajectories: Sequence[Trajectory], samples_per_prompt: int) -> Tensor:
    """[groups, samples], float32, of trajectories whose groups are neighbours; NaN where nobody gave a reward."""
    rewards = [math.nan if trajectory.reward is None else trajectory.reward for trajectory in trajectories]
    return torch.tensor(rewards, dtype=torch.float32).view(-1, samples_per_prompt)


def reward_parts_by_group(
    trajectories: Sequence[Trajectory], samples_per_prompt: int, functions: Sequence[str]
) -> Tensor:
    """[functions, groups, samples], float32: each reward function's own rewards, NaN where it gave none."""
    rows = [[trajectory.reward_parts.get(name, math.nan) for trajectory in trajectories] for name in functions]
    return torch.tensor(rows, dtype=torch.float32).view(len(functions), -1, samples_per_prompt)


def sampled_mask(trajectories: Sequence[Trajectory]) -> Tensor:
    """[tokens of all trajectories], bool: which tokens were sampled rather than given."""
    mask = torch.zeros(sum(len(trajectory.token_ids) for trajectory in trajectories), dtype=torch.bool)
    begin = 0
    for trajectory in trajectories:
        for span in trajectory.spans:
            mask[begin + span.start : begin + span.end] = True
        begin += len(trajectory.token_ids)
    return mask


def to_sequence_batch(
    trajectories: Sequence[Trajectory], *, overlong_filtering: bool, mark_positive: bool = False
) -> SequenceBatch:
    """Lay trajectories end to end with the loss mask and sampling log-probabilities of their tokens.

    The loss leaves out responses without a reward and those whose loss multiplier is 0.

    Args:
        trajectories: of one step.
        overlong_filtering: leave truncated responses out of the loss.
        mark_positive: add the entry "positive", 1.0 for the sampled tokens of correct responses.
    """
    sampled = sampled_mask(trajectories)
    counts = torch.tensor([trajectory.response_tokens for trajectory in trajectories])

    def spread(values: Iterable[float]) -> Tensor:
        """One value per trajectory -> its sampled tokens'."""
        tokens = torch.zeros(len(sampled))
        tokens[sampled] = torch.tensor(list(values), dtype=torch.float32).repeat_interleave(counts)
        return tokens

    generation_logprobs = torch.zeros(len(sampled))
    generation_logprobs[sampled] = torch.tensor([value for one in trajectories for value in one.logprobs])
    left_out = [
        one.reward is None or one.loss_multiplier <= 0 or (overlong_filtering and one.truncated) for one in trajectories
    ]
    tokens = {"loss_mask": spread(float(not out) for out in left_out), "generation_logprobs": generation_logprobs}
    if mark_positive:
        tokens["positive"] = spread(float(one.correct or False) for one in trajectories)
    return SequenceBatch(
        lengths=[len(trajectory.token_ids) for trajectory in trajectories],
        token_ids=torch.tensor([token for trajectory in trajectories for token in trajectory.token_ids]),
        tokens=tokens,
    )
