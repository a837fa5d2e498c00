"""Remarks on a configuration before its run starts: settings that are allowed and may not be intended."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_grpo.config.checks.loss import async_cautions
from megatron_grpo.config.checks.sampling import filter_cautions
from megatron_grpo.config.checks.unused import unused_settings
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.config.schema import Config, OptimizerConfig

_ZERO_OR_ONE = ("math", "addition", "format", "tools", "countdown")
"""Environments whose rewards are 0 or 1."""


def remarks(config: Config) -> Iterator[Problem]:
    """All remarks: cautions, and settings that change nothing."""
    yield from cautions(config)
    for unused in unused_settings(config):
        yield Problem(unused.subject, f"changes nothing in this run: {unused.text}")


def cautions(config: Config) -> Iterator[Problem]:
    """Settings that are allowed and may not be intended."""
    if config.generation.temperature == 0:
        text = "is greedy: all samples of a prompt are the same and teach nothing"
        yield Problem("generation.temperature=0", text)
    if config.loss_fn.disable_ppo_ratio and config.optimizer_steps_per_step > 1:
        text = (
            f"corrects nothing for the policy having moved, and {config.optimizer_steps_per_step} optimizer steps are "
            f"taken on the same samples; REINFORCE takes one: {config.passes_key}=1 and one minibatch"
        )
        yield Problem("loss_fn.disable_ppo_ratio=True", text)
    yield from async_cautions(config)
    yield from _rarely_ranked(config)
    yield from _long_warmups(config)
    yield from _threshold(config)
    yield from filter_cautions(config)


def _rarely_ranked(config: Config) -> Iterator[Problem]:
    checkpointing, period = config.checkpointing, config.loop.val_period
    ranked = config.saves and checkpointing.keep_top_k is not None
    if not ranked or not checkpointing.metric_name.startswith(VALIDATION_PREFIX):
        return
    if period == 0 or checkpointing.save_period % period:
        text = (
            f"saves steps without a validation, of which there is one every {config.algorithm}.val_period={period}; "
            f"they rank last by checkpointing.metric_name={checkpointing.metric_name}"
        )
        yield Problem(f"checkpointing.save_period={checkpointing.save_period}", text)


def _long_warmups(config: Config) -> Iterator[Problem]:
    steps, waiting = config.loop.max_num_steps, config.loop.steps_without_policy
    if config.loop.has_value_model:
        yield from _long_warmup(
            "value", config.value.optimizer, steps * config.value_optimizer_steps_per_step, config.algorithm
        )
    policy_steps = max(steps - waiting, 0) * config.optimizer_steps_per_step
    yield from _long_warmup("policy", config.policy.optimizer, policy_steps, config.algorithm)


def _long_warmup(section: str, optimizer: OptimizerConfig, steps: int, algorithm: str) -> Iterator[Problem]:
    if optimizer.warmup_ratio is None and optimizer.warmup_steps >= steps:
        text = (
            f"is not over before the run is: {algorithm}.max_num_steps makes {steps} optimizer steps, and none has "
            f"{section}.optimizer.lr={optimizer.lr:g}"
        )
        yield Problem(f"{section}.optimizer.warmup_steps={optimizer.warmup_steps}", text)


def _threshold(config: Config) -> Iterator[Problem]:
    """A threshold of early stopping that no validation reaches, or that every validation does."""
    stop = config.loop.early_stop
    if not stop.enabled or stop.threshold is None:
        return
    low, high = _bounds(config)
    name = stop.metric_name
    best, worst = (high, low) if stop.higher_is_better else (low, high)
    sign = 1 if stop.higher_is_better else -1
    subject = f"{config.algorithm}.early_stop.threshold={stop.threshold:g}"
    if sign * stop.threshold > sign * best:
        yield Problem(subject, f"cannot be reached: {name} is at {'most' if sign > 0 else 'least'} {best:g}")
    elif sign * stop.threshold <= sign * worst:
        text = f"is reached by any model: {name} is never {'below' if sign > 0 else 'above'} {worst:g}"
        yield Problem(subject, text)


def _bounds(config: Config) -> tuple[float, float]:
    """Least and greatest value of the metric of early stopping, as far as they are known."""
    name = config.loop.early_stop.metric_name.removeprefix(VALIDATION_PREFIX)
    if name in ("accuracy", "truncation_rate"):
        return 0.0, 1.0
    if name == "response_length":
        return 0.0, float(config.generation.max_new_tokens)
    if name == "reward" and all(one.type in _ZERO_OR_ONE for one in config.env.values()):
        return 0.0, 1.0
    return -math.inf, math.inf
