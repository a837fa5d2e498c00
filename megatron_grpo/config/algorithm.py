"""Checks of what rewards, advantages and loss are asked to do together."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.loss_schema import loss_problems
from megatron_grpo.config.reward_schema import reward_problems
from megatron_grpo.config.schema import Config


def algorithm_problems(config: Config) -> Iterator[Problem]:
    """Options that exclude each other, lack what they need, or would do nothing."""
    yield from reward_problems(config)
    yield from loss_problems(config.loss_fn)
    if config.loss_fn.force_on_policy_ratio and config.optimizer_steps_per_step > 1:
        text = (
            f"holds for the first optimizer step on a sample only, and there are {config.optimizer_steps_per_step}; "
            f"use {'ppo.ppo_epochs' if config.algorithm == 'ppo' else 'grpo.num_iterations'}=1 and one minibatch"
        )
        yield Problem("loss_fn.force_on_policy_ratio=True", text)
    generations, estimator = config.loop.num_generations_per_prompt, config.grpo.adv_estimator
    grouped = config.algorithm == "grpo" and (estimator.name != "reinforce_plus_plus" or estimator.minus_baseline)
    if generations < 2 and grouped:
        text = "the baseline of a sample comes from the others of its prompt; use 2 or more"
        yield Problem(f"grpo.num_generations_per_prompt={generations}", text)
