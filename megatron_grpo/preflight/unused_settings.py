"""Changed settings that change nothing in a run.

A rule is a tuple (do the keys change nothing?, keys, reason). Keys are separated by spaces; one that ends in a point or
an underscore stands for all that begin with it. Of several reasons the first is reported. LOOP and PASSES are those of
`rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_grpo.config.algorithms import explain_unread
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import list_changes
from megatron_grpo.config.loop_schema import DPOConfig, SampledLoopConfig
from megatron_grpo.config.schema import Config, GRPOConfig, PPOConfig
from megatron_grpo.preflight.objective_checks import list_idle_keys
from megatron_grpo.preflight.rules import Rule, fill_placeholders


def find_unused_settings(config: Config) -> Iterator[Problem]:
    """Find changed settings without effect, each with the first reason."""
    idle = [(True, keys, text) for keys, text in list_idle_keys(config)]
    rules = [*_list_switched_off(config), *_list_without_effect(config), *idle]
    unused = [(tuple(fill_placeholders(config, keys).split()), text) for is_unused, keys, text in rules if is_unused]
    value_sections = ("value", "value_loss_fn") if config.method.has_value_model else ()
    learning = ("loss_fn", config.loop_name, "reference", "policy", *value_sections)
    for section in (*learning, "data", "generation", "refit", "checkpointing", "logger"):
        for key, value in list_changes(config, section):
            texts = (text for names, text in unused if any(map(partial(_is_named, key), names)))
            if reason := explain_unread(config, key) or next(texts, None):
                yield Problem(f"{key}={value}", fill_placeholders(config, reason))


def _is_named(key: str, name: str) -> bool:
    return key.startswith(name) if name[-1] in "._" else key == name


def _list_switched_off(config: Config) -> Iterator[Rule]:
    """List the keys of options that are off."""
    text = "needs loss_fn.kl_type=mixed|jensen_shannon"
    yield config.loss_fn.kl_type not in ("mixed", "jensen_shannon"), "loss_fn.mixed_kl_weight", text
    yield from _list_of_loop(config)
    yield from _list_of_files(config)
    for section, optimizer in (("policy", config.policy.optimizer), ("value", config.value.optimizer)):
        key, style = f"{section}.optimizer", optimizer.decay_style
        yield style != "polynomial", f"{key}.decay_power", f"needs {key}.decay_style=polynomial"
        yield style != "cosine_with_restarts", f"{key}.decay_cycles", f"needs {key}.decay_style=cosine_with_restarts"
        text = f"needs {key}.decay_style=warmup_stable_decay"
        yield style != "warmup_stable_decay", f"{key}.final_decay_steps", text
        yield optimizer.name != "muon", f"{key}.muon_", f"needs {key}.name=muon"
    yield config.logger.tracker is None, "logger.tracker_options.", "needs logger.tracker"
    yield config.data.image_key is None, "data.max_images data.max_image_tokens", "needs data.image_key"
    keys = "policy.lora.alpha policy.lora.target_modules refit.adapters"
    yield config.policy.lora.rank == 0, keys, "needs policy.lora.rank above 0"
    generation, speculative = config.generation, config.generation.engine.speculative
    yield config.refit.mode != "files", "refit.directory", "needs refit.mode=files"
    yield not generation.endpoint.enabled, "generation.endpoint.", "needs generation.endpoint.enabled=true"
    yield not generation.server.urls, "generation.server.timeout_s", "needs generation.server.urls"
    text = "needs generation.engine.speculative.num_speculative_tokens above 0"
    yield speculative.num_speculative_tokens == 0, "generation.engine.speculative.", text
    text = "needs generation.engine.speculative.method=ngram"
    yield speculative.method != "ngram", "generation.engine.speculative.prompt_lookup_", text


def _list_of_loop(config: Config) -> Iterator[Rule]:
    loop, stop = config.loop, config.loop.early_stop
    yield not stop.enabled, "LOOP.early_stop.", "needs LOOP.early_stop.enabled=true"
    yield stop.patience is None, "LOOP.early_stop.min_delta", "needs LOOP.early_stop.patience"
    if isinstance(loop, GRPOConfig):
        text = "needs grpo.adv_estimator.name=grpo"
        yield loop.adv_estimator.name != "grpo", "grpo.use_leave_one_out_baseline", text
        has_own_scale = loop.adv_estimator.name in ("maxrl", "opo", "pass_at_k", "otb", "rae")
        yield has_own_scale, "grpo.normalize_rewards grpo.normalize_rewards_over", text
        text = "needs grpo.adv_estimator.name=pass_at_k"
        yield loop.adv_estimator.name != "pass_at_k", "grpo.adv_estimator.pass_k", text
        text = "needs grpo.adv_estimator.name=rae"
        yield loop.adv_estimator.name != "rae", "grpo.adv_estimator.baseline_decay", text
        yield not loop.normalize_rewards, "grpo.normalize_rewards_over", "needs grpo.normalize_rewards=true"
    if isinstance(loop, DPOConfig):
        text = "is always so with dpo.loss_type=simpo, which compares means over tokens"
        yield loop.loss_type == "simpo", "dpo.preference_average_log_probs", text
        yield loop.loss_type != "simpo", "dpo.target_margin", "needs dpo.loss_type=simpo"
    if not isinstance(loop, SampledLoopConfig):
        return
    keys, shaping = "LOOP.ref_model_mixup_alpha LOOP.ref_model_sync_steps", loop.reward_shaping
    yield not loop.sync_ref_model, keys, "needs LOOP.sync_ref_model=true"
    text = "needs LOOP.use_dynamic_sampling=true"
    yield not loop.use_dynamic_sampling, "LOOP.dynamic_sampling_max_gen_batches", text
    yield not loop.async_grpo.enabled, "LOOP.async_grpo.", "needs LOOP.async_grpo.enabled=true"
    yield not loop.reward_scaling.enabled, "LOOP.reward_scaling.", "needs LOOP.reward_scaling.enabled=true"
    yield not shaping.enabled, "LOOP.reward_shaping.", "needs LOOP.reward_shaping.enabled=true"
    keys = "LOOP.reward_shaping.overlong_buffer_penalty LOOP.reward_shaping.max_response_length"
    yield shaping.overlong_buffer_length is None, keys, "needs LOOP.reward_shaping.overlong_buffer_length"


def _list_of_files(config: Config) -> Iterator[Rule]:
    checkpointing, data, logger = config.checkpointing, config.data, config.logger
    keys = "checkpointing.save_period checkpointing.save_minutes checkpointing.async_save checkpointing.upload_to"
    keys += " checkpointing.push_to_hub checkpointing.upload_timeout_s"
    ranking_keys = "checkpointing.keep_top_k checkpointing.metric_name checkpointing.higher_is_better"
    ranking_keys += " checkpointing.keep_newest"
    yield not checkpointing.enabled, f"{keys} {ranking_keys}", "needs checkpointing.enabled=true"
    yield checkpointing.keep_top_k is None, ranking_keys, "needs checkpointing.keep_top_k"
    sends = checkpointing.upload_to is not None or checkpointing.push_to_hub is not None
    yield not sends, "checkpointing.upload_timeout_s", "needs checkpointing.upload_to or checkpointing.push_to_hub"
    yield checkpointing.metric_name is None, "checkpointing.higher_is_better", "needs checkpointing.metric_name"
    yield not data.streaming, "data.shuffle_buffer", "needs data.streaming=true"
    yield data.from_rollouts is None, "data.min_reward data.best_of_group", "needs data.from_rollouts"
    keys = "data.curriculum.raise_at data.curriculum.window"
    yield data.curriculum.column is None, keys, "needs data.curriculum.column"
    yield data.val_path is None, "data.val_split", "needs data.val_path"
    yield logger.rollouts != "sample", "logger.rollouts_sample", "needs logger.rollouts=sample"
    yield not logger.log_completions, "logger.num_completions_to_print", "needs logger.log_completions=true"
    for name in ("wandb", "mlflow", "swanlab", "rl_insight"):
        tracker = getattr(logger, name)
        yield not tracker.enabled, f"logger.{name}.", f"needs logger.{name}.enabled=true"


def _list_without_effect(config: Config) -> Iterator[Rule]:
    """List the keys of options that are on, in runs where they do nothing."""
    yield from _list_of_loss(config)
    yield from _list_of_rewards(config)
    text = "needs engines, and this run samples nothing"
    samples_nothing = config.method.rows is not None and not config.needs_generation
    yield samples_nothing, "LOOP.val_temperature LOOP.max_rollout_turns generation. refit.", text
    loop, data = config.loop, config.data
    keys = "LOOP.async_grpo.enabled LOOP.async_grpo.recompute_kv_cache_after_weight_updates"
    text = "with LOOP.async_grpo.max_trajectory_age_steps=0 nothing is sampled while a step trains"
    yield config.async_sampling.max_trajectory_age_steps == 0, keys, text
    text = "is for engines that the run starts; give python -m megatron_grpo.serve the argument of vLLM"
    keys = "generation.engine. generation.engine_args. generation.generation_batch_size"
    yield config.generation.server.urls, keys, text
    text = "is of data.train_path; each of data.train_sets has a split of its own"
    yield data.train_sets, "data.train_split", text
    text = "is of data.train_path and data.val_path; each of data.train_sets and data.val_sets has a subset of its own"
    yield data.train_sets and data.val_path is None, "data.subset", text
    text = "adds no whole prompt to LOOP.num_prompts_per_step"
    adds_none = config.prompts_per_generation_batch == loop.num_prompts_per_step
    yield adds_none, "LOOP.batch_multiplier", text
    keys = "data.chat_template data.chat_template_kwargs. data.tools"
    yield not data.has_chat_prompts, keys, "needs data.apply_chat_template=true"
    fp8, kernel, has_filter = config.policy.fp8, config.policy.logprob_kernel, config.generation.has_training_filter
    yield fp8.format == "off", "policy.fp8.", "needs policy.fp8.format=hybrid or e4m3"
    text = "keeps weights in FP8 on a GPU, and FP8 is simulated"
    yield fp8.simulate, "policy.fp8.parameters", text
    yield fp8.recipe != "delayed", "policy.fp8.amax_", "is for policy.fp8.recipe=delayed"
    for section, optimizer in (("policy", config.policy.optimizer), ("value", config.value.optimizer)):
        key = f"{section}.optimizer"
        is_constant = optimizer.decay_style in ("constant", "constant_with_warmup")
        yield (
            is_constant,
            f"{key}.min_lr {key}.decay_steps",
            f"{key}.decay_style={optimizer.decay_style} leaves the rate as it is",
        )
    is_fused = kernel == "fused" or (kernel == "auto" and config.cluster.gpus > 0)
    text = "is for policy.logprob_kernel=chunked"
    yield is_fused and not has_filter, "policy.logprob_chunk_size", text
    text = "is for whole distributions; with a filter of sampling log-probabilities are computed by chunks"
    yield has_filter and not config.uses_reference, "policy.logprob_kernel", text


def _list_of_loss(config: Config) -> Iterator[Rule]:
    text = "limits how far values move within a step, and before its one optimizer step they have not moved; give more"
    text += " steps with value.train_global_batch_samples below the samples of a step, or with PASSES above 1"
    has_one_value_step = config.method.has_value_model and config.value_optimizer_steps_per_step == 1
    yield has_one_value_step, "value_loss_fn.value_clip", text
    text = "is of what others write between the turns of a rollout; needs LOOP.max_rollout_turns above 1, or an agent"
    has_one_turn = config.loop.max_rollout_turns == 1 and not config.generation.endpoint.enabled
    yield has_one_turn, "loss_fn.environment_nll_weight", text
    has_none = not config.uses_reference
    keys = (
        "loss_fn.reference_policy_kl_type loss_fn.use_on_policy_kl_approximation loss_fn.kl_score_function_gradient "
        "loss_fn.kl_input_clamp_value loss_fn.kl_output_clamp_value"
    )
    yield has_none, keys, "needs loss_fn.reference_policy_kl_penalty above 0"
    yield has_none, "reference.offload", "there is no reference policy"
    text = "with policy.lora.rank above 0 the reference is the policy without its adapters, and takes no memory"
    yield config.policy.lora.rank > 0, "reference.offload", text


def _list_of_rewards(config: Config) -> Iterator[Rule]:
    loop, stop = config.loop, config.loop.early_stop
    if isinstance(loop, PPOConfig):
        estimator = loop.adv_estimator
        text = "is the lambda of policy and value model where they have none of their own, and both have one"
        policy_has_own = estimator.gae_lambda_policy is not None or estimator.length_adaptive_alpha
        have_own = estimator.gae_lambda_value is not None and policy_has_own
        yield have_own, "ppo.adv_estimator.gae_lambda", text
    if isinstance(loop, SampledLoopConfig):
        yield from _list_of_shaping(loop)
    keys = "LOOP.val_period LOOP.val_batch_size LOOP.max_val_samples LOOP.val_temperature"
    yield not config.data.validation_sets, keys, "needs data.val_path or data.val_sets"
    text = "needs a validation to decide after: LOOP.val_period below LOOP.max_num_steps"
    ends_first = loop.val_period >= loop.max_num_steps and (stop.threshold is None or not loop.val_at_start)
    yield ends_first, "LOOP.early_stop.enabled", text


def _list_of_shaping(loop: SampledLoopConfig) -> Iterator[Rule]:
    shaping = loop.reward_shaping
    key = "LOOP.reward_shaping.stop_properly_penalty_coef"
    yield shaping.stop_properly_penalty_coef == 1, key, "takes nothing away; give less than 1"
    keys = "LOOP.reward_shaping.overlong_buffer_length LOOP.reward_shaping.overlong_buffer_penalty"
    text = "subtracts nothing; give LOOP.reward_shaping.overlong_buffer_penalty above 0"
    yield shaping.overlong_buffer_penalty == 0, keys, text
    text = "needs LOOP.ref_model_sync_steps below LOOP.max_num_steps"
    yield loop.ref_model_sync_steps >= loop.max_num_steps, "LOOP.sync_ref_model", text
