"""Checks of what PPO is asked to do, and that a run sets no key of the algorithm that it does not run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.composition.misplaced import misplaced
from megatron_grpo.config.changes import changed
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.loop_keys import READ_BY, other_than
from megatron_grpo.config.ppo_schema import PPOAdvantageConfig
from megatron_grpo.config.schema import Config


def ppo_problems(config: Config) -> Iterator[Problem]:
    """Options that exclude each other, lack what they need, or that nothing would read."""
    for section in READ_BY[other_than(config.algorithm)]:
        for key, value in changed(config, section):
            yield Problem(f"{key}={value}", misplaced(key, config.algorithm))
    if config.algorithm == "ppo":
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
    if ppo.calculate_advantages_on_gpu and config.cluster.gpus == 0:
        yield Problem("ppo.calculate_advantages_on_gpu=True", "this is a run on CPU: cluster.gpus is 0")


def _estimator(estimator: PPOAdvantageConfig) -> Iterator[Problem]:
    prefix, default = "ppo.adv_estimator", PPOAdvantageConfig()
    if estimator.name == "raw_reward":
        for name in ("gae_lambda", "gae_lambda_policy", "gae_lambda_value", "length_adaptive_alpha"):
            value = getattr(estimator, name)
            is_off = name == "length_adaptive_alpha" and not value
            if value != getattr(default, name) and not is_off:
                text = f"has no meaning with {prefix}.name=raw_reward, which takes rewards as they are"
                yield Problem(f"{prefix}.{name}={getattr(estimator, name)}", text)
    elif estimator.length_adaptive_alpha and estimator.gae_lambda_policy is not None:
        text = f"excludes {prefix}.gae_lambda_policy: both say what the policy's lambda is"
        yield Problem(f"{prefix}.length_adaptive_alpha={estimator.length_adaptive_alpha:g}", text)
