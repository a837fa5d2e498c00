"""Checks of a configuration by itself: what does not fit together, and what changes nothing in it."""

from __future__ import annotations

from megatron_grpo.config.checks.loop import loop_problems
from megatron_grpo.config.checks.loss import loss_problems
from megatron_grpo.config.checks.ppo import ppo_problems
from megatron_grpo.config.checks.prompts import prompt_problems
from megatron_grpo.config.checks.rewards import reward_problems
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config


def config_problems(config: Config) -> list[Problem]:
    """Options that exclude each other, lack what they need or would do nothing.

    Args:
        config: whose values are all of their types and in their ranges.
    """
    return [
        *prompt_problems(config),
        *loop_problems(config),
        *reward_problems(config),
        *loss_problems(config),
        *ppo_problems(config),
    ]
