"""Remarks on a configuration before its run starts: settings that may not be intended, or that change nothing.

A setting that differs from its default and changes nothing, because a switch it belongs to is off, is no mistake: a
recipe's values stay while its switch is turned off. But nobody should compare a variant that changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter

from megatron_grpo.config.checks.loss import async_cautions
from megatron_grpo.config.checks.sampling import filter_cautions
from megatron_grpo.config.data_schema import DataConfig
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import changed
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


NEEDS: dict[str, tuple[str, ...]] = {
    "loss_fn.use_sapo=true": ("loss_fn.sapo_temperature_pos", "loss_fn.sapo_temperature_neg"),
    "LOOP.sync_ref_model=true": ("LOOP.ref_model_mixup_alpha", "LOOP.ref_model_sync_steps"),
    "LOOP.use_dynamic_sampling=true": ("LOOP.dynamic_sampling_max_gen_batches",),
    "LOOP.async_grpo.enabled=true": ("LOOP.async_grpo.",),
    "LOOP.normalize_rewards=true": ("LOOP.normalize_rewards_over",),
    "LOOP.reward_scaling.enabled=true": ("LOOP.reward_scaling.",),
    "LOOP.reward_shaping.enabled=true": ("LOOP.reward_shaping.",),
    "LOOP.early_stop.enabled=true": ("LOOP.early_stop.",),
    "refit.mode=files": ("refit.directory",),
    "generation.endpoint.enabled=true": ("generation.endpoint.",),
    "checkpointing.enabled=true": ("checkpointing.keep_top_k", "checkpointing.save_period", "checkpointing.async_save"),
    "data.streaming=true": ("data.shuffle_buffer",),
    "logger.rollouts=sample": ("logger.rollouts_sample",),
    "logger.log_completions=true": ("logger.num_completions_to_print",),
    "logger.wandb.enabled=true": ("logger.wandb.",),
    "logger.mlflow.enabled=true": ("logger.mlflow.",),
}
"""By the switch that they need, KEY=VALUE: keys, or sections with a point at the end. LOOP stands for the
algorithm's section."""

_RATIO_KEYS = (
    "loss_fn.use_cispo",
    "loss_fn.use_sapo",
    "loss_fn.ratio_clip_c",
    "loss_fn.ratio_clip_min",
    "loss_fn.ratio_clip_max",
)
_KL_KEYS = (
    "loss_fn.reference_policy_kl_type",
    "loss_fn.use_on_policy_kl_approximation",
    "loss_fn.kl_score_function_gradient",
    "loss_fn.kl_input_clamp_value",
    "loss_fn.kl_output_clamp_value",
)
_ALL_RATIOS_ARE_1 = (
    "acts on ratios away from 1, and with one optimizer step on a sample all ratios are 1; give more with "
    "policy.train_global_batch_samples below the samples of a step, or with PASSES above 1"
)


def _renders_chats(data: DataConfig) -> bool:
    """Whether the prompts of some task are rendered with a chat template."""
    return data.apply_chat_template or any(task.apply_chat_template for task in data.tasks.values())


UNUSED: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (_RATIO_KEYS, lambda config: config.optimizer_steps_per_step == 1, _ALL_RATIOS_ARE_1),
    (
        ("loss_fn.disable_ppo_ratio",),
        lambda config: config.optimizer_steps_per_step == 1,
        "with one optimizer step on a sample all ratios are 1, and the gradient is that of REINFORCE anyway",
    ),
    (
        ("loss_fn.force_on_policy_ratio",),
        lambda config: not config.needs_prev_logprobs,
        "with one optimizer step on a sample the policy is the old one anyway",
    ),
    (
        ("loss_fn.sequence_level_importance_ratios",),
        lambda config: config.optimizer_steps_per_step == 1 and not config.loss_fn.use_importance_sampling_correction,
        _ALL_RATIOS_ARE_1,
    ),
    (
        ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
        lambda config: config.loss_fn.use_sapo or config.loss_fn.disable_ppo_ratio,
        "clips nothing with loss_fn.use_sapo or loss_fn.disable_ppo_ratio",
    ),
    (_KL_KEYS, lambda config: not config.uses_reference, "needs loss_fn.reference_policy_kl_penalty above 0"),
    (
        ("LOOP.sync_ref_model",),
        lambda config: config.loop.ref_model_sync_steps >= config.loop.max_num_steps,
        "needs LOOP.ref_model_sync_steps below LOOP.max_num_steps",
    ),
    (
        ("LOOP.async_grpo.enabled", "LOOP.async_grpo.recompute_kv_cache_after_weight_updates"),
        lambda config: config.loop.async_grpo.max_trajectory_age_steps == 0,
        "with LOOP.async_grpo.max_trajectory_age_steps=0 nothing is sampled while a step trains",
    ),
    (
        ("LOOP.batch_multiplier",),
        lambda config: config.prompts_per_generation_batch == config.loop.num_prompts_per_step,
        "adds no whole prompt to LOOP.num_prompts_per_step",
    ),
    (
        ("LOOP.use_leave_one_out_baseline",),
        lambda config: config.grpo.adv_estimator.name != "grpo",
        "is for LOOP.adv_estimator.name=grpo",
    ),
    (
        ("LOOP.adv_estimator.gae_lambda",),
        lambda config: config.ppo.adv_estimator.has_own_lambdas,
        "is what the policy and the value model have where nothing else is said of them, and both have their own",
    ),
    (
        ("value_loss_fn.value_clip",),
        lambda config: config.value_optimizer_steps_per_step == 1,
        "limits how far values move within a step, and one optimizer step is taken at the values as they were; give "
        "more with value.train_global_batch_samples below the samples of a step, or with PASSES above 1",
    ),
    (("reference.offload",), lambda config: not config.uses_reference, "there is no reference policy"),
    (
        ("reference.offload",),
        lambda config: config.policy.lora.rank > 0,
        "with policy.lora.rank above 0 the reference is the policy without its adapters, and takes no memory",
    ),
    (
        ("policy.fp8.",),
        lambda config: config.policy.fp8.format == "off",
        "needs policy.fp8.format=hybrid or e4m3",
    ),
    (
        ("policy.fp8.parameters",),
        lambda config: config.policy.fp8.simulate,
        "keeps weights in FP8 on a GPU, and FP8 is simulated",
    ),
    (
        ("policy.fp8.amax_history", "policy.fp8.amax_algorithm"),
        lambda config: config.policy.fp8.recipe != "delayed",
        "is for policy.fp8.recipe=delayed",
    ),
    (
        ("policy.lora.alpha", "policy.lora.target_modules"),
        lambda config: config.policy.lora.rank == 0,
        "needs policy.lora.rank above 0",
    ),
    (
        ("LOOP.reward_shaping.overlong_buffer_penalty", "LOOP.reward_shaping.max_response_length"),
        lambda config: config.loop.reward_shaping.overlong_buffer_length is None,
        "needs LOOP.reward_shaping.overlong_buffer_length",
    ),
    (
        ("LOOP.reward_shaping.stop_properly_penalty_coef",),
        lambda config: config.loop.reward_shaping.stop_properly_penalty_coef == 1,
        "takes nothing away; give less than 1",
    ),
    (
        ("LOOP.reward_shaping.overlong_buffer_length", "LOOP.reward_shaping.overlong_buffer_penalty"),
        lambda config: config.loop.reward_shaping.overlong_buffer_penalty == 0,
        "subtracts nothing; give LOOP.reward_shaping.overlong_buffer_penalty above 0",
    ),
    (
        ("LOOP.early_stop.enabled",),
        lambda config: (
            config.loop.val_period >= config.loop.max_num_steps
            and (config.loop.early_stop.threshold is None or not config.loop.val_at_start)
        ),
        "needs a validation to decide after: LOOP.val_period below LOOP.max_num_steps",
    ),
    (
        ("LOOP.early_stop.min_delta",),
        lambda config: config.loop.early_stop.patience is None,
        "says what an improvement is, and needs LOOP.early_stop.patience",
    ),
    (
        ("policy.optimizer.min_lr", "policy.optimizer.decay_steps"),
        lambda config: config.policy.optimizer.is_constant,
        "needs policy.optimizer.decay_style=linear or cosine",
    ),
    (
        ("value.optimizer.min_lr", "value.optimizer.decay_steps"),
        lambda config: config.value.optimizer.is_constant,
        "needs value.optimizer.decay_style=linear or cosine",
    ),
    (
        ("policy.logprob_chunk_size",),
        lambda config: (
            config.policy.logprob_kernel == "fused"
            or (config.policy.logprob_kernel == "auto" and config.cluster.gpus > 0)
        ),
        "is for policy.logprob_kernel=chunked",
    ),
    (
        ("generation.engine.", "generation.engine_args.", "generation.generation_batch_size"),
        lambda config: bool(config.generation.server.urls),
        "is for engines that the run starts; give python -m megatron_grpo.serve the argument of vLLM",
    ),
    (
        ("generation.server.timeout_s",),
        lambda config: not config.generation.server.urls,
        "needs generation.server.urls",
    ),
    (
        ("generation.engine.speculative.prompt_lookup_min", "generation.engine.speculative.prompt_lookup_max"),
        lambda config: config.generation.engine.speculative.num_speculative_tokens == 0,
        "needs generation.engine.speculative.num_speculative_tokens above 0",
    ),
    (
        ("checkpointing.metric_name", "checkpointing.higher_is_better"),
        lambda config: not config.checkpointing.enabled or config.checkpointing.keep_top_k is None,
        "ranks checkpoints, and needs checkpointing.keep_top_k",
    ),
    (
        ("LOOP.val_period", "LOOP.val_batch_size", "LOOP.max_val_samples", "LOOP.val_temperature"),
        lambda config: not config.data.validation,
        "needs data.val_path or data.val_sets",
    ),
    (("data.val_split",), lambda config: config.data.val_path is None, "needs data.val_path"),
    (
        ("data.train_split",),
        lambda config: bool(config.data.train_sets),
        "is of data.train_path; each of data.train_sets has a split of its own",
    ),
    (
        ("data.subset",),
        lambda config: bool(config.data.train_sets) and config.data.val_path is None,
        "is of data.train_path and data.val_path; each of data.train_sets and data.val_sets has a subset of its own",
    ),
    (
        ("data.chat_template", "data.chat_template_kwargs.", "data.tools"),
        lambda config: not _renders_chats(config.data),
        "needs data.apply_chat_template=true",
    ),
)
"""Keys and sections, whether they are unused, and what they need or why they change nothing. PASSES is the key of the
passes over a step's samples. Of the rows that cover a key, the first that applies is the message."""


def unused_settings(config: Config) -> Iterator[Problem]:
    """Each setting that differs from its default and changes nothing in this run, once, with what it needs."""
    names = {"LOOP": config.algorithm, "PASSES": config.passes_key}
    of_ppo = ("value", "value_loss_fn") if config.loop.has_value_model else ()
    learning = ("loss_fn", config.algorithm, "reference", "policy", *of_ppo)
    for section in (*learning, "data", "generation", "refit", "checkpointing", "logger"):
        for key, value in changed(config, section):
            text = _reason(config, key, names)
            if text is not None:
                yield Problem(f"{key}={value}", text)


def _reason(config: Config, key: str, names: dict[str, str]) -> str | None:
    """Why a setting changes nothing; None: it is used."""
    for switch, keys in NEEDS.items():
        name, _, wanted = _named(switch, names).partition("=")
        if _covered(keys, key, names) and str(attrgetter(name)(config)).lower() != wanted:
            return f"needs {name}={wanted}"
    for keys, is_unused, text in UNUSED:
        if _covered(keys, key, names) and is_unused(config):
            return _named(text, names)
    return None


def _covered(keys: tuple[str, ...], key: str, names: dict[str, str]) -> bool:
    """Whether a key is among keys, or lies in a section among them, whose name ends in a point."""
    wanted = [_named(one, names) for one in keys]
    return any(key.startswith(one) if one.endswith(".") else key == one for one in wanted)


def _named(text: str, names: dict[str, str]) -> str:
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    return text
