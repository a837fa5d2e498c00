"""Starting what runs rollouts, and what they are scored by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.schema import Config
from megatron_grpo.environments.pool import build_environments
from megatron_grpo.environments.settings import environment_settings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.rollouts.endpoint import endpoint_settings
from megatron_grpo.rollouts.lost_engines import Restore, not_replaced
from megatron_grpo.rollouts.pool import RolloutPool


def start_rollouts(
    config: Config,
    folder: Path,
    generation: VllmGeneration,
    stack: ExitStack,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    restore: Restore = not_replaced,
) -> RolloutPool:
    """Begin to start rollout workers over engines, and the environments. The stack ends them.

    Args:
        config: the configuration of a run, or of an evaluation.
        folder: the model's folder in Hugging Face format.
        generation: the engines, which are being started.
        stack: ends what is started here.
        rewards: a script's reward functions, by their entry in reward_funcs.
        restore: replaces engines that are lost.
    """
    environments = build_environments(config.env, environment_settings(config, folder), rewards)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    rollouts = RolloutPool(
        config.rollouts,
        generation.engines,
        environments,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        max_turns=config.loop.max_rollout_turns,
        generation_timeout_s=config.generation.timeout_s,
        routed=generation.routed,
        endpoint=endpoint_settings(config.generation.endpoint, folder),
        restore=restore,
    )
    stack.callback(rollouts.shutdown)
    rollouts.start()
    return rollouts


def start_readers(config: Config, stack: ExitStack) -> RolloutPool:
    """Begin to start rollout workers that sample nothing: they read a recording, compute on its tokens and write."""
    rollouts = RolloutPool(
        config.rollouts,
        [],
        {},
        max_total_sequence_length=config.policy.max_total_sequence_length,
        generation_timeout_s=config.generation.timeout_s,
    )
    stack.callback(rollouts.shutdown)
    rollouts.start()
    return rollouts


def replaced_by(generation: VllmGeneration) -> Restore:
    """What replaces lost engines whose weights are those of the model folder."""

    def restore(lost: Mapping[int, str]) -> None:
        try:
            generation.replace(lost)
        except RunError as error:
            raise SamplingError(str(error)) from error

    return restore
