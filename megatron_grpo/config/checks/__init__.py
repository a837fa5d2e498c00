"""Checks of a configuration by itself: settings that do not fit together, and settings that change nothing."""

from __future__ import annotations

from itertools import chain

from megatron_grpo.config.checks import loop, loss, rewards, sampling
from megatron_grpo.config.checks.rules import broken
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config


def config_problems(config: Config) -> list[Problem]:
    """Options that exclude each other, lack what they need or would do nothing.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
    """
    rules = chain(
        rewards.prompt_rules(config),
        sampling.request_rules(config.generation),
        sampling.filter_rules(config),
        sampling.server_rules(config),
        loop.loop_rules(config),
        loss.async_rules(config),
        rewards.reward_rules(config),
        loss.loss_rules(config),
        loop.ppo_rules(config),
        loop.debug_rules(config),
    )
    return list(broken(config, rules))


def sampling_problems(config: Config) -> list[Problem]:
    """Problems of those settings that sampling and scoring read, for an evaluation."""
    rules = chain(
        rewards.system_prompt_rules(config),
        sampling.request_rules(config.generation),
        sampling.server_rules(config),
        rewards.environment_rules(config),
    )
    return list(broken(config, rules))
