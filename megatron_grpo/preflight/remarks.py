"""Remarks on settings that may not be intended, or that change nothing.

A changed setting without effect, because its switch is off, is not a mistake. One that the user set is reported, so
that nobody compares a variant that changes nothing; a recipe's may stay while its switch is turned off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.loop_names import translate_key
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX, SampledLoopConfig
from megatron_grpo.config.run_schema import CheckpointingConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.objective_checks import check_objective_cautions
from megatron_grpo.preflight.rules import Rule, evaluate_rules
from megatron_grpo.preflight.sampling_checks import check_filter_cautions
from megatron_grpo.preflight.unused_settings import find_unused_settings
from megatron_grpo.run.checkpoints import choose_ranking

# Environments whose rewards are 0 or 1.
_ZERO_OR_ONE = ("math", "addition", "format", "tools", "countdown")


def find_remarks(config: Config, user_keys: Collection[str] | None = None) -> Iterator[Problem]:
    """Find settings that may not be intended, or change nothing.

    `user_keys`: those that are remarked on where they change nothing; None: all.
    """
    yield from find_cautions(config)
    for unused in find_unused_settings(config):
        if user_keys is None or translate_key("grpo", unused.key) in user_keys:
            yield Problem(unused.subject, f"changes nothing in this run: {unused.text}")


@evaluate_rules
def find_cautions(config: Config) -> Iterator[Rule]:
    """Find settings that are allowed and may not be intended."""
    yield from check_objective_cautions(config)
    yield from _check_samples(config)
    yield from _check_checkpoints(config)
    yield from _check_warmups(config)
    yield from _check_threshold(config)
    yield from check_filter_cautions(config)


def _check_samples(config: Config) -> Iterator[Rule]:
    """Remark on samples that teach nothing, or are of other weights."""
    text = "is greedy: all samples of a prompt are the same and teach nothing"
    yield config.generation.temperature == 0, "generation.temperature=", text
    loop = config.loop
    if not isinstance(loop, SampledLoopConfig) or not loop.async_grpo.can_sample_ahead:
        return
    text = "puts no limit on the importance weights of samples from earlier versions of the policy;"
    text += " loss_fn.truncated_importance_sampling_type=tis and loss_fn.truncated_importance_sampling_ratio=2 give"
    text += " one"
    has_limit = config.loss_fn.chosen_weight is not None
    yield config.loss_fn.has_weights and not has_limit, "LOOP.async_grpo.enabled=", text
    text = "also leaves out responses from earlier versions of the policy, on which the frameworks need not disagree"
    yield loop.seq_logprob_error_threshold is not None, "LOOP.seq_logprob_error_threshold=", text


def _check_checkpoints(config: Config) -> Iterator[Rule]:
    checkpointing, period = choose_ranking(config), config.loop.val_period
    if not config.has_checkpoints or checkpointing.keep_top_k is None:
        return
    name = checkpointing.metric_name
    text = "is of a validation, and this run has none; reward ranks checkpoints"
    is_chosen = config.checkpointing.metric_name not in (CheckpointingConfig().metric_name, "reward")
    yield is_chosen and name == "reward", "checkpointing.metric_name=", text
    text = f"saves steps without a validation, of which there is one every LOOP.val_period={period};"
    text += f" they rank last by checkpointing.metric_name={name}"
    is_rare = period == 0 or checkpointing.save_period % period
    is_ranked_by_validation = name is not None and name.startswith(VALIDATION_PREFIX)
    yield is_ranked_by_validation and is_rare, "checkpointing.save_period=", text


def _check_warmups(config: Config) -> Iterator[Rule]:
    steps = config.loop.max_num_steps
    policy_steps = max(steps - config.steps_without_policy, 0) * config.optimizer_steps_per_step
    models = [("policy", config.policy.optimizer, policy_steps)]
    if config.method.has_value_model:
        models.insert(0, ("value", config.value.optimizer, steps * config.value_optimizer_steps_per_step))
    for section, optimizer, optimizer_steps in models:
        # A warm-up given as a ratio follows the length of the run, so it always ends.
        is_long = optimizer.warmup_ratio is None and optimizer.warmup_steps >= optimizer_steps
        text = f"is not over before the run is: LOOP.max_num_steps makes {optimizer_steps} optimizer steps,"
        text += f" and none has {section}.optimizer.lr={optimizer.lr:g}"
        yield is_long, f"{section}.optimizer.warmup_steps=", text


def _check_threshold(config: Config) -> Iterator[Rule]:
    stop = config.loop.early_stop
    if not stop.enabled or stop.threshold is None:
        return
    # A threshold outside the metric's range would run to max_num_steps, or stop after the first validation.
    low, high = _find_bounds(config)
    best, worst = (high, low) if stop.higher_is_better else (low, high)
    sign, extreme, side = (1, "most", "below") if stop.higher_is_better else (-1, "least", "above")
    is_unreachable = sign * stop.threshold > sign * best
    text = f"cannot be reached: {stop.metric_name} is at {extreme} {best:g}"
    yield is_unreachable, "LOOP.early_stop.threshold=", text
    text = f"is reached by any model: {stop.metric_name} is never {side} {worst:g}"
    yield not is_unreachable and sign * stop.threshold <= sign * worst, "LOOP.early_stop.threshold=", text


def _find_bounds(config: Config) -> tuple[float, float]:
    """Find the least and greatest value of the metric of early stopping."""
    name = config.loop.early_stop.metric_name.removeprefix(VALIDATION_PREFIX)
    if name == "response_length":
        return 0.0, math.inf if config.generation.endpoint.enabled else float(config.most_sampled_tokens)
    has_zero_or_one = name == "reward" and all(task.type in _ZERO_OR_ONE for task in config.env.values())
    if has_zero_or_one or name in ("accuracy", "truncation_rate"):
        return 0.0, 1.0
    return -math.inf, math.inf
