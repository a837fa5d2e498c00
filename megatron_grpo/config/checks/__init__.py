"""Checks of a configuration as a whole: of itself, of what it asks of the machine, of what changes nothing in it."""

from __future__ import annotations

from megatron_grpo.config.checks.layout import layout_problems
from megatron_grpo.config.checks.loop import loop_problems
from megatron_grpo.config.checks.loss import loss_problems
from megatron_grpo.config.checks.ppo import ppo_problems
from megatron_grpo.config.checks.rewards import reward_problems
from megatron_grpo.config.checks.sampling import sampling_problems
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.model_shape import ModelShape
from megatron_grpo.config.schema import Config


def config_problems(config: Config, shape: ModelShape | None) -> list[Problem]:
    """Options that exclude each other, lack what they need or would do nothing; sizes that do not fit.

    Args:
        config: whose values are all of their types and in their ranges.
        shape: of the policy's model; None: not known, and what depends on it is left out.
    """
    return [
        *layout_problems(config, shape),
        *sampling_problems(config, shape),
        *loop_problems(config),
        *reward_problems(config),
        *loss_problems(config),
        *ppo_problems(config),
    ]
