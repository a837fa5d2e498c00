"""Checks of a configuration by itself: what does not fit together, and what changes nothing in it."""

from __future__ import annotations

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.checks.async_grpo import async_problems, oversampling_problems
from megatron_grpo.preflight.checks.debug import debug_problems
from megatron_grpo.preflight.checks.loop import loop_problems
from megatron_grpo.preflight.checks.loss import loss_problems
from megatron_grpo.preflight.checks.ppo import ppo_problems
from megatron_grpo.preflight.checks.prompts import prompt_problems
from megatron_grpo.preflight.checks.reports import report_problems
from megatron_grpo.preflight.checks.rewards import reward_problems
from megatron_grpo.preflight.checks.sampling import sampling_problems
from megatron_grpo.preflight.checks.servers import server_problems


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
