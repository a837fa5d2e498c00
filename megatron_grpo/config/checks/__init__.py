"""Checks of a configuration by itself: settings that do not fit together, and settings that change nothing."""

from __future__ import annotations

from megatron_grpo.config.checks.loop import debug_problems, loop_problems, ppo_problems, report_problems
from megatron_grpo.config.checks.loss import async_problems, loss_problems, oversampling_problems
from megatron_grpo.config.checks.rewards import prompt_problems, reward_problems
from megatron_grpo.config.checks.sampling import sampling_problems, server_problems
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config


def config_problems(config: Config) -> list[Problem]:
    """Options that exclude each other, lack what they need or would do nothing.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
    """
    return [
        *prompt_problems(config),
        *sampling_problems(config),
        *server_problems(config),
        *loop_problems(config),
        *async_problems(config),
        *oversampling_problems(config),
        *reward_problems(config),
        *loss_problems(config),
        *ppo_problems(config),
        *report_problems(config),
        *debug_problems(config),
    ]
