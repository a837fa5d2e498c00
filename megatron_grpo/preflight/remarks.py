"""Remarks on settings that may not be intended, or that change nothing.

A changed setting without effect, because its switch is off, is not a mistake: a recipe's values may stay while its
switch is turned off. It is reported so that nobody compares a variant that changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import fill_placeholders, is_met, list_changes, load_tables
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.loop_checks import check_async_cautions
from megatron_grpo.preflight.rules import Rule, find_broken_rules
from megatron_grpo.preflight.sampling_checks import check_filter_cautions

# Environments whose rewards are 0 or 1.
_ZERO_OR_ONE = ("math", "addition", "format", "tools", "countdown")


def find_remarks(config: Config) -> Iterator[Problem]:
    """Find settings that may not be intended, and those that change nothing."""
    yield from find_cautions(config)
    for unused in find_unused_settings(config):
        yield Problem(unused.subject, f"changes nothing in this run: {unused.text}")


def find_cautions(config: Config) -> Iterator[Problem]:
    """Find settings that are allowed and may not be intended."""
    checks = (_check_single_settings, check_async_cautions, _check_warmups, _check_threshold, check_filter_cautions)
    return find_broken_rules(config, chain.from_iterable(check(config) for check in checks))


def _check_single_settings(config: Config) -> Iterator[Rule]:
    text = "is greedy: all samples of a prompt are the same and teach nothing"
    yield config.generation.temperature == 0, "generation.temperature=", text
    steps = config.optimizer_steps_per_step
    text = (
        f"does not correct for the policy's updates, and this configuration makes {steps} optimizer steps on the same "
        "samples; REINFORCE takes one: set PASSES=1 and one minibatch"
    )
    yield config.loss_fn.disable_ppo_ratio and steps > 1, "loss_fn.disable_ppo_ratio=", text
    checkpointing, period = config.ranked_checkpointing, config.training_loop.val_period
    is_ranked = config.has_checkpoints and checkpointing.keep_top_k is not None
    text = "is of a validation, and this run has none; reward ranks checkpoints"
    yield is_ranked and checkpointing != config.checkpointing, "checkpointing.metric_name=", text
    is_ranked_by_validation = is_ranked and (checkpointing.metric_name or "").startswith(VALIDATION_PREFIX)
    text = (
        f"saves steps without a validation, of which there is one every LOOP.val_period={period}; "
        f"they rank last by checkpointing.metric_name={checkpointing.metric_name}"
    )
    is_rare = period == 0 or checkpointing.save_period % period
    yield is_ranked_by_validation and is_rare, "checkpointing.save_period=", text


def _check_warmups(config: Config) -> Iterator[Rule]:
    steps = config.training_loop.max_num_steps
    policy_steps = max(steps - config.steps_without_policy, 0) * config.optimizer_steps_per_step
    models = [("policy", config.policy.optimizer, policy_steps)]
    if config.training_loop.has_value_model:
        models.insert(0, ("value", config.value.optimizer, steps * config.value_optimizer_steps_per_step))
    for section, optimizer, optimizer_steps in models:
        text = (
            f"is not over before the run is: LOOP.max_num_steps makes {optimizer_steps} optimizer steps, and none has "
            f"{section}.optimizer.lr={optimizer.lr:g}"
        )
        is_long = optimizer.warmup_ratio is None and optimizer.warmup_steps >= optimizer_steps
        yield is_long, f"{section}.optimizer.warmup_steps=", text


def _check_threshold(config: Config) -> Iterator[Rule]:
    stop = config.training_loop.early_stop
    if not stop.enabled or stop.threshold is None:
        return
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
    name = config.training_loop.early_stop.metric_name.removeprefix(VALIDATION_PREFIX)
    if name in ("accuracy", "truncation_rate"):
        return 0.0, 1.0
    if name == "response_length":
        return 0.0, float(config.generation.max_new_tokens)
    if name == "reward" and all(environment.type in _ZERO_OR_ONE for environment in config.env.values()):
        return 0.0, 1.0
    return -math.inf, math.inf


# Keys by the setting that they need, written KEY=VALUE, "KEY above 0", or KEY (neither null nor empty).
NEEDS = load_tables("switches.yaml")["needs"]

# (whether settings are unused, their keys: a name that ends in a point is a section, what they need or why they change
# nothing). LOOP and PASSES stand for keys of the algorithm, as in `Rule`.
_Unused = tuple[object, str, str]


def _list_unused_by_loss(config: Config) -> Iterator[_Unused]:
    loss, loop, has_one_step = config.loss_fn, config.training_loop, config.optimizer_steps_per_step == 1
    ratios_are_1 = (
        "acts on ratios away from 1, and with one optimizer step on a sample all ratios are 1; give more with "
        "policy.train_global_batch_samples below the samples of a step, or with PASSES above 1"
    )
    keys = "loss_fn.use_cispo loss_fn.use_sapo loss_fn.ratio_clip_c loss_fn.ratio_clip_min loss_fn.ratio_clip_max"
    yield has_one_step, keys, ratios_are_1
    text = "with one optimizer step on a sample all ratios are 1, and the gradient is that of REINFORCE anyway"
    yield has_one_step, "loss_fn.disable_ppo_ratio", text
    text = "with one optimizer step on a sample the policy is the old one anyway"
    yield not config.needs_prev_logprobs, "loss_fn.force_on_policy_ratio", text
    is_corrected = loss.use_importance_sampling_correction
    yield has_one_step and not is_corrected, "loss_fn.sequence_level_importance_ratios", ratios_are_1
    text = "clips nothing with loss_fn.use_sapo or loss_fn.disable_ppo_ratio"
    yield loss.use_sapo or loss.disable_ppo_ratio, "loss_fn.ratio_clip_min loss_fn.ratio_clip_max", text
    keys = (
        "loss_fn.reference_policy_kl_type loss_fn.use_on_policy_kl_approximation loss_fn.kl_score_function_gradient "
        "loss_fn.kl_input_clamp_value loss_fn.kl_output_clamp_value"
    )
    yield not config.uses_reference, keys, "needs loss_fn.reference_policy_kl_penalty above 0"
    text = (
        "limits how far values move within a step, and before its one optimizer step they have not moved; give more "
        "steps with value.train_global_batch_samples below the samples of a step, or with PASSES above 1"
    )
    yield loop.has_value_model and config.value_optimizer_steps_per_step == 1, "value_loss_fn.value_clip", text


def _list_unused_by_loop(config: Config) -> Iterator[_Unused]:
    loop, shaping = config.training_loop, config.training_loop.reward_shaping
    text = "needs LOOP.ref_model_sync_steps below LOOP.max_num_steps"
    yield loop.ref_model_sync_steps >= loop.max_num_steps, "LOOP.sync_ref_model", text
    keys = "LOOP.async_grpo.enabled LOOP.async_grpo.recompute_kv_cache_after_weight_updates"
    text = "with LOOP.async_grpo.max_trajectory_age_steps=0 nothing is sampled while a step trains"
    yield loop.async_grpo.max_trajectory_age_steps == 0, keys, text
    text = "adds no whole prompt to LOOP.num_prompts_per_step"
    yield config.prompts_per_generation_batch == loop.num_prompts_per_step, "LOOP.batch_multiplier", text
    text = "is the lambda of policy and value model where they have none of their own, and both have one"
    estimator = config.ppo.adv_estimator
    has_policy_lambda = estimator.gae_lambda_policy is not None or estimator.length_adaptive_alpha
    yield has_policy_lambda and estimator.gae_lambda_value is not None, "LOOP.adv_estimator.gae_lambda", text
    coefficient = shaping.stop_properly_penalty_coef
    yield coefficient == 1, "LOOP.reward_shaping.stop_properly_penalty_coef", "takes nothing away; give less than 1"
    keys = "LOOP.reward_shaping.overlong_buffer_length LOOP.reward_shaping.overlong_buffer_penalty"
    text = "subtracts nothing; give LOOP.reward_shaping.overlong_buffer_penalty above 0"
    yield shaping.overlong_buffer_penalty == 0, keys, text
    is_unused = loop.val_period >= loop.max_num_steps and (loop.early_stop.threshold is None or not loop.val_at_start)
    text = "needs a validation to decide after: LOOP.val_period below LOOP.max_num_steps"
    yield is_unused, "LOOP.early_stop.enabled", text
    keys = "LOOP.val_period LOOP.val_batch_size LOOP.max_val_samples LOOP.val_temperature"
    yield not config.data.validation_sets, keys, "needs data.val_path or data.val_sets"


def _list_unused_elsewhere(config: Config) -> Iterator[_Unused]:
    policy, fp8 = config.policy, config.policy.fp8
    yield not config.uses_reference, "reference.offload", "there is no reference policy"
    text = "with policy.lora.rank above 0 the reference is the policy without its adapters, and takes no memory"
    yield policy.lora.rank > 0, "reference.offload", text
    yield fp8.format == "off", "policy.fp8.", "needs policy.fp8.format=hybrid or e4m3"
    yield fp8.simulate, "policy.fp8.parameters", "keeps weights in FP8 on a GPU, and FP8 is simulated"
    keys = "policy.fp8.amax_history policy.fp8.amax_algorithm"
    yield fp8.recipe != "delayed", keys, "is for policy.fp8.recipe=delayed"
    for section, optimizer in (("policy.optimizer", policy.optimizer), ("value.optimizer", config.value.optimizer)):
        keys, text = f"{section}.min_lr {section}.decay_steps", f"needs {section}.decay_style=linear or cosine"
        yield optimizer.is_constant, keys, text
    is_fused = policy.logprob_kernel == "fused" or (policy.logprob_kernel == "auto" and config.cluster.gpus > 0)
    has_filter = config.generation.has_training_filter
    yield is_fused and not has_filter, "policy.logprob_chunk_size", "is for policy.logprob_kernel=chunked"
    text = "is for whole distributions; with a filter of sampling log-probabilities are computed by chunks"
    yield has_filter and not config.uses_reference, "policy.logprob_kernel", text

    data, urls = config.data, config.generation.server.urls
    text = "is for engines that the run starts; give python -m megatron_grpo.serve the argument of vLLM"
    yield urls, "generation.engine. generation.engine_args. generation.generation_batch_size", text
    text = "is of data.train_path; each of data.train_sets has a split of its own"
    yield data.train_sets, "data.train_split", text
    text = "is of data.train_path and data.val_path; each of data.train_sets and data.val_sets has a subset of its own"
    yield data.train_sets and data.val_path is None, "data.subset", text
    has_chats = data.apply_chat_template or any(task.apply_chat_template for task in data.tasks.values())
    keys = "data.chat_template data.chat_template_kwargs. data.tools"
    yield not has_chats, keys, "needs data.apply_chat_template=true"


def find_unused_settings(config: Config) -> Iterator[Problem]:
    """Find changed settings without effect, each with the first reason."""
    tables = (_list_switched_off, _list_unused_by_loss, _list_unused_by_loop, _list_unused_elsewhere)
    rows = [(keys, text) for table in tables for is_unused, keys, text in table(config) if is_unused]
    unused = [(tuple(fill_placeholders(config, keys).split()), fill_placeholders(config, text)) for keys, text in rows]
    value_sections = ("value", "value_loss_fn") if config.training_loop.has_value_model else ()
    learning = ("loss_fn", config.algorithm, "reference", "policy", *value_sections)
    for section in (*learning, "data", "generation", "refit", "checkpointing", "logger"):
        for key, value in list_changes(config, section):
            reasons = (text for keys, text in unused if any(_is_named(key, name) for name in keys))
            if (reason := next(reasons, None)) is not None:
                yield Problem(f"{key}={value}", reason)


def _list_switched_off(config: Config) -> Iterator[_Unused]:
    for switch, keys in NEEDS.items():
        needed = fill_placeholders(config, switch)
        yield not is_met(config, needed), keys, f"needs {needed}"


def _is_named(key: str, name: str) -> bool:
    return key.startswith(name) if name.endswith(".") else key == name
