"""The scoring stage: from the environments' rewards to the scores that advantages and dynamic sampling read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron_grpo.config.schema import Config
from megatron_grpo.data.trajectory import Outcome
from megatron_grpo.losses.advantages import gdpo_scores, has_signal, scale_rewards, shape_rewards


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some groups of samples."""

    rewards: Tensor
    """[groups, samples], float32: as advantages are to see them, scaled and then shaped; NaN where there is none."""
    parts: Tensor | None
    """[functions, groups, samples], float32: each reward function's own rewards, NaN where it gave none. None unless
    the advantage estimator compares them."""
    weights: Tensor | None
    """[functions], float32: of the reward functions in the sum; None with parts."""
    differs: Tensor
    """[groups], bool: whether the samples of the group got different rewards (with GDPO, different advantages)."""
    kept: Tensor
    """[groups], bool: whether dynamic sampling keeps the group."""

    def of_groups(self, numbers: Sequence[int]) -> Scores:
        """The scores of the groups with these numbers, in this order."""
        index = torch.tensor(numbers, dtype=torch.long)
        parts = None if self.parts is None else self.parts[:, index]
        return Scores(self.rewards[index], parts, self.weights, self.differs[index], self.kept[index])

    @staticmethod
    def joined(scores: Sequence[Scores]) -> Scores:
        """The scores of several sets of groups, one after the other."""
        parts = [one.parts for one in scores if one.parts is not None]
        return Scores(
            rewards=torch.cat([one.rewards for one in scores]),
            parts=torch.cat(parts, dim=1) if parts else None,
            weights=scores[0].weights,
            differs=torch.cat([one.differs for one in scores]),
            kept=torch.cat([one.kept for one in scores]),
        )


def score(config: Config, outcomes: Sequence[Outcome]) -> Scores:
    """Rewards as they are learnt from, and which groups can teach anything.

    A group is kept when its rewards differ before and after shaping. Penalties for length alone do not make a signal:
    responses that are all right or all wrong differ in length nearly always, and DAPO drops them (Yu et al. 2025, eq.
    11). They may take one away. With GDPO, a group counts when its functions tell its samples apart: also where the
    sums of the rewards are equal, and not where their normalised rewards cancel out.

    Args:
        config: how rewards are scaled and shaped, and which estimator looks at them.
        outcomes: outcomes of whole groups; the samples of a prompt are neighbours.
    """
    samples = config.loop.num_generations_per_prompt
    given = [math.nan if outcome.reward is None else outcome.reward for outcome in outcomes]
    scaled = scale_rewards(torch.tensor(given, dtype=torch.float32).view(-1, samples), config.loop.reward_scaling)
    rewards = shape_rewards(
        scaled,
        torch.tensor([outcome.response_tokens for outcome in outcomes]).view(-1, samples),
        torch.tensor([outcome.truncated for outcome in outcomes]).view(-1, samples),
        config.loop.reward_shaping,
        config.generation.max_new_tokens,
    )
    if config.grpo.adv_estimator.name == "gdpo":
        parts, weights = _parts(config, outcomes)
        differs = has_signal(gdpo_scores(parts, weights))
        return Scores(rewards, parts, weights, differs, differs)
    differs = has_signal(rewards)
    return Scores(rewards, None, None, differs, has_signal(scaled) & differs)


def _parts(config: Config, outcomes: Sequence[Outcome]) -> tuple[Tensor, Tensor]:
    """Rewards by function, [functions, groups, samples], and the functions' weights, [functions], both float32."""
    weights = {name: weight for one in config.env.values() for name, weight in one.weights_by_function().items()}
    rows = [[outcome.reward_parts.get(name, math.nan) for outcome in outcomes] for name in weights]
    parts = torch.tensor(rows, dtype=torch.float32).view(len(weights), -1, config.loop.num_generations_per_prompt)
    return parts, torch.tensor(list(weights.values()))


Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class DynamicBatch(Generic[Group]):
    """What dynamic sampling made of one generation batch."""

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
    """Add the groups with a signal to those that already wait, and say whether they fill a step.

    Groups keep the order in which they were sampled. What is over after slicing is not kept for the next step: it was
    sampled from weights that are about to change.

    Args:
        groups: groups of one generation batch.
        signal: [groups], bool, see `has_signal`.
        num_prompts_per_step: groups that a step trains on.
        batch_cache: what earlier generation batches of this step left waiting.
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
