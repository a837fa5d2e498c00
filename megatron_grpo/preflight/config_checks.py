"""Checks of a configuration by itself: settings that do not fit together, and settings that change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.schema import Config
from megatron_grpo.preflight import loop_checks as loop
from megatron_grpo.preflight import loss_checks as loss
from megatron_grpo.preflight import reward_checks as rewards
from megatron_grpo.preflight import sampling_checks as sampling
from megatron_grpo.preflight.rules import Rule, as_problems


@as_problems
def config_problems(config: Config) -> Iterator[Rule]:
    """Options that exclude each other, lack what they need or would do nothing.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
    """
    yield from rewards.prompt_rules(config)
    yield from sampling.request_rules(config.generation)
    yield from sampling.filter_rules(config)
    yield from sampling.server_rules(config)
    yield from loop.loop_rules(config)
    yield from loss.async_rules(config)
    yield from rewards.reward_rules(config)
    yield from loss.loss_rules(config)
    yield from loop.ppo_rules(config)
    yield from loop.debug_rules(config)


@as_problems
def sampling_problems(config: Config) -> Iterator[Rule]:
    """Problems of those settings that sampling and scoring read, for an evaluation."""
    yield from rewards.system_prompt_rules(config)
    yield from sampling.request_rules(config.generation)
    yield from sampling.server_rules(config)
    yield from rewards.environment_rules(config)
