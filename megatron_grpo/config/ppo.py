"""Checks of what PPO is asked to do, and that a run sets no key of the algorithm that it does not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.ppo_schema import PPOAdvantageConfig
from megatron_grpo.config.schema import Config, LoopConfig

_SECTIONS_OF_PPO = ("ppo", "value", "value_loss_fn")


def ppo_problems(config: Config) -> Iterator[Problem]:
    """Options that exclude each other, lack what they need, or that nothing would read."""
    if config.algorithm != "ppo":
        for section in _SECTIONS_OF_PPO:
            for key, value in _changed(config, section):
                yield Problem(f"{key}={value}", "is for algorithm=ppo, and this run has algorithm=grpo")
        return
    shared = {field.name for field in dataclasses.fields(LoopConfig)}
    for key, value in _changed(config, "grpo"):
        name = key.removeprefix("grpo.")
        text = f"give ppo.{name}" if name.partition(".")[0] in shared else "the value model is PPO's baseline"
        yield Problem(f"{key}={value}", f"is for algorithm=grpo, and this run has algorithm=ppo; {text}")
    yield from _loop(config)
    yield from _estimator(config.ppo.adv_estimator)


def _loop(config: Config) -> Iterator[Problem]:
    ppo, penalty = config.ppo, config.loss_fn.reference_policy_kl_penalty
    if ppo.policy_training_start_step >= ppo.max_num_steps:
        text = f"leaves none of the ppo.max_num_steps={ppo.max_num_steps} steps to the policy"
        yield Problem(f"ppo.policy_training_start_step={ppo.policy_training_start_step}", text)
    if ppo.skip_reference_policy_logprobs_calculation and penalty > 0:
        text = (
            f"leaves nothing to compare with, and loss_fn.reference_policy_kl_penalty={penalty:g} has to; set it to 0"
        )
        yield Problem("ppo.skip_reference_policy_logprobs_calculation=True", text)
    if ppo.use_dynamic_sampling and ppo.num_generations_per_prompt < 2:
        text = "keeps prompts whose samples differ; needs ppo.num_generations_per_prompt of 2 or more"
        yield Problem("ppo.use_dynamic_sampling=True", text)


def _estimator(estimator: PPOAdvantageConfig) -> Iterator[Problem]:
    prefix, default = "ppo.adv_estimator", PPOAdvantageConfig()
    if estimator.name == "raw_reward":
        for name in ("gae_lambda", "gae_lambda_policy", "gae_lambda_value", "length_adaptive_alpha"):
            if getattr(estimator, name) != getattr(default, name):
                text = f"has no meaning with {prefix}.name=raw_reward, which takes rewards as they are"
                yield Problem(f"{prefix}.{name}={getattr(estimator, name)}", text)
    elif estimator.length_adaptive_alpha is not None and estimator.gae_lambda_policy is not None:
        text = f"excludes {prefix}.gae_lambda_policy: both say what the policy's lambda is"
        yield Problem(f"{prefix}.length_adaptive_alpha={estimator.length_adaptive_alpha:g}", text)


def _changed(config: Config, section: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a section that are not at their defaults, with their values."""
    defaults = dict(_leaves(dataclasses.asdict(getattr(Config(), section)), f"{section}."))
    for key, value in _leaves(dataclasses.asdict(getattr(config, section)), f"{section}."):
        if value != defaults[key]:
            yield key, value


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
