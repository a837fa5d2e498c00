"""What a user most likely meant by a key that the schema does not have."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import keys
from megatron_grpo.config.loop_schema import is_foreign_to, named_for, other_than

TRL = {
    "adam_epsilon": "policy.optimizer.adam_eps",
    "beta": "loss_fn.reference_policy_kl_penalty",
    "bf16": "policy.precision",
    "cast_lm_head_to_fp32": "policy.precision",
    "cliprange": "loss_fn.ratio_clip_min loss_fn.ratio_clip_max",
    "cliprange_value": "value_loss_fn.value_clip",
    "dataset_name": "data.train_path",
    "dataset_train_split": "data.train_path",
    "dataset_test_split": "data.val_path",
    "delta": "loss_fn.ratio_clip_c",
    "dynamic_sampling": "grpo.use_dynamic_sampling",
    "epsilon": "loss_fn.ratio_clip_min loss_fn.ratio_clip_max",
    "epsilon_high": "loss_fn.ratio_clip_max",
    "eval_on_start": "grpo.val_at_start",
    "eval_steps": "grpo.val_period",
    "eval_strategy": "grpo.val_period",
    "fp16": "policy.precision",
    "generation_batch_size": "generation.generation_batch_size",
    "generation_kwargs": "generation.presence_penalty generation.frequency_penalty generation.bad_words",
    "gradient_accumulation_steps": "policy.train_global_batch_samples",
    "gradient_checkpointing": "policy.activation_checkpointing",
    "importance_sampling_level": "loss_fn.sequence_level_importance_ratios",
    "kl_coef": "loss_fn.reference_policy_kl_penalty",
    "kl_estimator": "loss_fn.reference_policy_kl_type",
    "lam": "ppo.adv_estimator.gae_lambda",
    "learning_rate": "policy.optimizer.lr",
    "log_completions": "logger.log_completions",
    "logging_dir": "run_dir",
    "lora_alpha": "policy.lora.alpha",
    "lora_r": "policy.lora.rank",
    "lora_target_modules": "policy.lora.target_modules",
    "loss_type": "loss_fn.token_level_loss loss_fn.constant_normalizer_tokens",
    "lr_scheduler_type": "policy.optimizer.decay_style",
    "mask_truncated_completions": "grpo.overlong_filtering",
    "max_completion_length": "generation.max_new_tokens",
    "max_length": "policy.max_total_sequence_length",
    "max_prompt_length": "data.max_input_seq_length",
    "max_seq_length": "policy.max_total_sequence_length",
    "max_steps": "grpo.max_num_steps",
    "min_p": "generation.min_p",
    "model_name_or_path": "policy.model.path",
    "model": "policy.model.path",
    "num_completions_to_print": "logger.num_completions_to_print",
    "num_generations": "grpo.num_generations_per_prompt",
    "num_iterations": "grpo.num_iterations",
    "num_ppo_epochs": "ppo.ppo_epochs",
    "num_train_epochs": "grpo.max_num_epochs",
    "off_policy_mask_threshold": "grpo.seq_logprob_error_threshold",
    "output_dir": "run_dir",
    "per_device_eval_batch_size": "grpo.val_batch_size",
    "per_device_train_batch_size": "policy.microbatch_tokens policy.train_global_batch_samples",
    "ref_model_mixup_alpha": "grpo.ref_model_mixup_alpha",
    "ref_model_sync_steps": "grpo.ref_model_sync_steps",
    "repetition_penalty": "generation.repetition_penalty",
    "report_to": "logger.wandb.enabled logger.tensorboard logger.mlflow.enabled",
    "response_length": "generation.max_new_tokens",
    "resume_from_checkpoint": "checkpointing.resume",
    "reward_funcs": "env.NAME.reward_funcs",
    "reward_weights": "env.NAME.reward_weights",
    "run_name": "logger.wandb.name",
    "sapo_temperature_neg": "loss_fn.sapo_temperature_neg",
    "sapo_temperature_pos": "loss_fn.sapo_temperature_pos",
    "save_steps": "checkpointing.save_period",
    "save_strategy": "checkpointing.save_period",
    "save_total_limit": "checkpointing.keep_top_k",
    "scale_rewards": "grpo.normalize_rewards",
    "shuffle_dataset": "data.shuffle",
    "sync_ref_model": "grpo.sync_ref_model",
    "temperature": "generation.temperature",
    "top_k": "generation.top_k",
    "top_p": "generation.top_p",
    "total_episodes": "grpo.max_num_steps",
    "use_peft": "policy.lora.rank",
    "vllm_dtype": "generation.engine.dtype",
    "vllm_enable_prefix_caching": "generation.engine.enable_prefix_caching",
    "vllm_gpu_memory_utilization": "generation.engine.gpu_memory_utilization",
    "vllm_guided_decoding_regex": "generation.structured.regex",
    "vllm_importance_sampling_cap": "loss_fn.truncated_importance_sampling_ratio",
    "vllm_importance_sampling_correction": "loss_fn.use_importance_sampling_correction",
    "vllm_importance_sampling_mode": "loss_fn.truncated_importance_sampling_type",
    "vllm_enable_sleep_mode": "generation.placement",
    "vllm_max_model_len": "policy.max_total_sequence_length",
    "vllm_max_model_length": "policy.max_total_sequence_length",
    "vllm_mode": "generation.placement",
    "vllm_structured_outputs_regex": "generation.structured.regex",
    "vllm_tensor_parallel_size": "generation.parallel.tensor",
    "warmup_ratio": "policy.optimizer.warmup_ratio",
}

NEMO_RL = {
    "grpo.async.enabled": "grpo.async_grpo.enabled",
    "grpo.async.max_trajectory_age_steps": "grpo.async_grpo.max_trajectory_age_steps",
    "checkpointing.checkpoint_dir": "run_dir",
    "data.dataset_name": "data.train_path",
    "data.train.data_path": "data.train_path",
    "data.train.dataset_name": "data.train_path",
    "data.train_data_path": "data.train_path",
    "data.val_data_path": "data.val_path",
    "data.validation.data_path": "data.val_path",
    "logger.log_dir": "run_dir",
    "logger.tensorboard_enabled": "logger.tensorboard",
    "logger.wandb_enabled": "logger.wandb.enabled",
    "logger.mlflow_enabled": "logger.mlflow.enabled",
    "policy.dtensor_cfg.activation_checkpointing": "policy.activation_checkpointing",
    "policy.dtensor_cfg.context_parallel_size": "policy.parallel.context",
    "policy.dtensor_cfg.sequence_parallel": "policy.parallel.sequence",
    "policy.dtensor_cfg.tensor_parallel_size": "policy.parallel.tensor",
    "policy.dynamic_batching.logprob_mb_tokens": "policy.logprob_microbatch_tokens",
    "policy.dynamic_batching.train_mb_tokens": "policy.microbatch_tokens",
    "policy.generation.colocated.enabled": "generation.placement",
    "policy.generation.max_new_tokens": "generation.max_new_tokens",
    "policy.generation.stop_strings": "generation.stop_strings",
    "policy.generation.stop_token_ids": "generation.stop_token_ids",
    "policy.generation.temperature": "generation.temperature",
    "policy.generation.top_k": "generation.top_k",
    "policy.generation.top_p": "generation.top_p",
    "policy.generation.vllm_cfg.enforce_eager": "generation.engine.enforce_eager",
    "policy.generation.vllm_cfg.expert_parallel_size": "generation.parallel.expert",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "generation.engine.gpu_memory_utilization",
    "policy.generation.vllm_cfg.max_model_len": "policy.max_total_sequence_length",
    "policy.generation.vllm_cfg.pipeline_parallel_size": "generation.parallel.pipeline",
    "policy.generation.vllm_cfg.precision": "generation.engine.dtype",
    "policy.generation.vllm_kwargs": "generation.engine_args",
    "policy.generation.vllm_cfg.tensor_parallel_size": "generation.parallel.tensor",
    "policy.generation_batch_size": "generation.generation_batch_size",
    "policy.logprob_batch_size": "policy.logprob_microbatch_tokens",
    "policy.megatron_cfg.activation_checkpointing": "policy.activation_checkpointing",
    "policy.megatron_cfg.context_parallel_size": "policy.parallel.context",
    "policy.megatron_cfg.expert_model_parallel_size": "policy.parallel.expert",
    "policy.megatron_cfg.expert_tensor_parallel_size": "policy.parallel.expert_tensor",
    "policy.megatron_cfg.moe_router_bias_update_rate": "policy.moe.bias_update_rate",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": "policy.parallel.first_stage_layers",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": "policy.parallel.last_stage_layers",
    "policy.megatron_cfg.fp8_cfg.enabled": "policy.fp8.format",
    "policy.megatron_cfg.fp8_cfg.fp8": "policy.fp8.format",
    "policy.megatron_cfg.fp8_cfg.fp8_param": "policy.fp8.parameters",
    "policy.megatron_cfg.fp8_cfg.fp8_recipe": "policy.fp8.recipe",
    "policy.megatron_cfg.optimizer.adam_beta1": "policy.optimizer.adam_beta1",
    "policy.megatron_cfg.optimizer.adam_beta2": "policy.optimizer.adam_beta2",
    "policy.megatron_cfg.optimizer.adam_eps": "policy.optimizer.adam_eps",
    "policy.megatron_cfg.optimizer.clip_grad": "policy.max_grad_norm",
    "policy.megatron_cfg.optimizer.lr": "policy.optimizer.lr",
    "policy.megatron_cfg.optimizer.min_lr": "policy.optimizer.min_lr",
    "policy.megatron_cfg.optimizer.use_distributed_optimizer": "policy.optimizer.distributed",
    "policy.megatron_cfg.optimizer.weight_decay": "policy.optimizer.weight_decay",
    "policy.megatron_cfg.peft.alpha": "policy.lora.alpha",
    "policy.megatron_cfg.peft.dim": "policy.lora.rank",
    "policy.megatron_cfg.peft.enabled": "policy.lora.rank",
    "policy.megatron_cfg.peft.target_modules": "policy.lora.target_modules",
    "policy.megatron_cfg.pipeline_dtype": "policy.precision",
    "policy.megatron_cfg.pipeline_model_parallel_size": "policy.parallel.pipeline",
    "policy.megatron_cfg.scheduler.lr_decay_iters": "policy.optimizer.decay_steps",
    "policy.megatron_cfg.scheduler.lr_decay_style": "policy.optimizer.decay_style",
    "policy.megatron_cfg.scheduler.lr_warmup_iters": "policy.optimizer.warmup_steps",
    "policy.megatron_cfg.sequence_parallel": "policy.parallel.sequence",
    "policy.megatron_cfg.tensor_model_parallel_size": "policy.parallel.tensor",
    "policy.model_name": "policy.model.path",
    "policy.optimizer.kwargs.eps": "policy.optimizer.adam_eps",
    "policy.optimizer.kwargs.lr": "policy.optimizer.lr",
    "policy.optimizer.kwargs.weight_decay": "policy.optimizer.weight_decay",
    "value_loss_fn.cliprange": "value_loss_fn.value_clip",
    "policy.sequence_packing.enabled": "policy.packing",
    "policy.sequence_packing.logprob_mb_tokens": "policy.logprob_microbatch_tokens",
    "policy.sequence_packing.train_mb_tokens": "policy.microbatch_tokens",
    "policy.train_global_batch_size": "policy.train_global_batch_samples",
    "policy.train_micro_batch_size": "policy.microbatch_tokens",
}

VERL = {
    "async_training.staleness_threshold": "grpo.async_grpo.max_trajectory_age_steps",
    "actor_rollout_ref.actor.clip_ratio": "loss_fn.ratio_clip_min loss_fn.ratio_clip_max",
    "actor_rollout_ref.actor.clip_ratio_c": "loss_fn.ratio_clip_c",
    "actor_rollout_ref.actor.clip_ratio_high": "loss_fn.ratio_clip_max",
    "actor_rollout_ref.actor.clip_ratio_low": "loss_fn.ratio_clip_min",
    "actor_rollout_ref.actor.entropy_coeff": "loss_fn.entropy_coef",
    "actor_rollout_ref.actor.grad_clip": "policy.max_grad_norm",
    "actor_rollout_ref.actor.kl_loss_coef": "loss_fn.reference_policy_kl_penalty",
    "actor_rollout_ref.actor.kl_loss_type": "loss_fn.reference_policy_kl_type",
    "actor_rollout_ref.actor.loss_agg_mode": "loss_fn.token_level_loss loss_fn.constant_normalizer_tokens",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "policy.parallel.context",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "policy.parallel.expert",
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": "policy.parallel.expert_tensor",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "policy.parallel.pipeline",
    "actor_rollout_ref.actor.megatron.sequence_parallel": "policy.parallel.sequence",
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": "policy.parallel.virtual_pipeline",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "policy.parallel.tensor",
    "actor_rollout_ref.actor.optim.lr": "policy.optimizer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "policy.optimizer.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "policy.optimizer.warmup_ratio",
    "actor_rollout_ref.actor.optim.weight_decay": "policy.optimizer.weight_decay",
    "actor_rollout_ref.actor.ppo_epochs": "ppo.ppo_epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "policy.microbatch_tokens",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "policy.microbatch_tokens",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "policy.microbatch_tokens",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "policy.train_global_batch_samples",
    "actor_rollout_ref.actor.use_kl_loss": "loss_fn.reference_policy_kl_penalty",
    "actor_rollout_ref.hybrid_engine": "generation.placement",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "policy.activation_checkpointing",
    "actor_rollout_ref.model.lora_alpha": "policy.lora.alpha",
    "actor_rollout_ref.model.lora_rank": "policy.lora.rank",
    "actor_rollout_ref.model.target_modules": "policy.lora.target_modules",
    "actor_rollout_ref.model.path": "policy.model.path",
    "actor_rollout_ref.rollout.dtype": "generation.engine.dtype",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "generation.engine.enable_chunked_prefill",
    "actor_rollout_ref.rollout.enable_prefix_caching": "generation.engine.enable_prefix_caching",
    "actor_rollout_ref.rollout.enforce_eager": "generation.engine.enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine": "generation.placement",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generation.engine.gpu_memory_utilization",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "policy.logprob_microbatch_tokens",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "policy.logprob_microbatch_tokens",
    "actor_rollout_ref.rollout.max_model_len": "policy.max_total_sequence_length",
    "actor_rollout_ref.rollout.engine_kwargs.vllm": "generation.engine_args",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "generation.engine.max_num_batched_tokens",
    "actor_rollout_ref.rollout.max_num_seqs": "generation.engine.max_num_seqs",
    "actor_rollout_ref.rollout.n": "grpo.num_generations_per_prompt",
    "actor_rollout_ref.rollout.over_sample_rate": "grpo.async_grpo.oversampling_factor",
    "actor_rollout_ref.rollout.prompt_length": "data.max_input_seq_length",
    "actor_rollout_ref.rollout.response_length": "generation.max_new_tokens",
    "actor_rollout_ref.rollout.temperature": "generation.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "generation.parallel.tensor",
    "actor_rollout_ref.rollout.top_k": "generation.top_k",
    "actor_rollout_ref.rollout.top_p": "generation.top_p",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "grpo.val_temperature",
    "algorithm.adv_estimator": "algorithm grpo.adv_estimator.name",
    "algorithm.filter_groups.enable": "grpo.use_dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": "grpo.dynamic_sampling_max_gen_batches",
    "algorithm.gamma": "ppo.adv_estimator.gae_gamma",
    "algorithm.kl_ctrl.kl_coef": "loss_fn.reference_policy_kl_penalty",
    "algorithm.kl_penalty": "loss_fn.reference_policy_kl_type",
    "algorithm.lam": "ppo.adv_estimator.gae_lambda",
    "algorithm.norm_adv_by_std_in_grpo": "grpo.normalize_rewards",
    "algorithm.use_kl_in_reward": "loss_fn.use_kl_in_reward",
    "critic.cliprange_value": "value_loss_fn.value_clip",
    "critic.model.path": "value.model.path",
    "critic.optim.lr": "value.optimizer.lr",
    "critic.ppo_mini_batch_size": "value.train_global_batch_samples",
    "custom_reward_function.name": "env.NAME.reward_funcs",
    "custom_reward_function.path": "env.NAME.reward_funcs",
    "data.max_prompt_length": "data.max_input_seq_length",
    "data.max_response_length": "generation.max_new_tokens",
    "data.reward_fn_key": "data.task_name",
    "data.seed": "grpo.seed",
    "data.train_batch_size": "grpo.num_prompts_per_step",
    "data.train_files": "data.train_path",
    "data.val_batch_size": "grpo.val_batch_size",
    "data.val_files": "data.val_path",
    "reward_model.overlong_buffer.enable": "grpo.reward_shaping.enabled",
    "reward_model.overlong_buffer.len": "grpo.reward_shaping.overlong_buffer_length",
    "reward_model.overlong_buffer.penalty_factor": "grpo.reward_shaping.overlong_buffer_penalty",
    "trainer.critic_warmup": "ppo.policy_training_start_step",
    "trainer.default_local_dir": "run_dir",
    "trainer.experiment_name": "name logger.wandb.name",
    "trainer.logger": "logger.tensorboard logger.wandb.enabled logger.mlflow.enabled",
    "trainer.max_actor_ckpt_to_keep": "checkpointing.keep_top_k",
    "trainer.n_gpus_per_node": "cluster.gpus_per_node",
    "trainer.nnodes": "cluster.num_nodes",
    "trainer.project_name": "logger.wandb.project",
    "trainer.resume_from_path": "checkpointing.resume",
    "trainer.resume_mode": "checkpointing.resume",
    "trainer.save_freq": "checkpointing.save_period",
    "trainer.test_freq": "grpo.val_period",
    "trainer.total_epochs": "grpo.max_num_epochs",
    "trainer.total_training_steps": "grpo.max_num_steps",
    "trainer.val_before_train": "grpo.val_at_start",
}

NOT_HERE = {
    "load_in_4bit": "quantised training",
    "load_in_8bit": "quantised training",
    "use_liger_kernel": "Liger kernels",
    "use_liger_loss": "Liger kernels",
}
"""Names of what there is no setting for, with what they are about."""

TABLES = {"TRL": TRL, "NeMo RL": NEMO_RL, "verl": VERL}
"""By framework."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A setting of another framework, in the names of this one."""

    framework: str
    name: str
    """What the setting is called in the other framework."""
    keys: tuple[str, ...]
    """Keys of this configuration that say what the setting says."""


def translated(name: str) -> Translation | None:
    """What a name of another framework is here: a whole name, or the last parts of one (megatron_cfg.optimizer.lr)."""
    return _first(lambda foreign: name == foreign or ("." in name and foreign.endswith(f".{name}")))


def loosely_translated(name: str) -> Translation | None:
    """What a name is here that has another framework's as its last part, or that is the last part of one."""
    word = name.rpartition(".")[2]
    return _first(lambda foreign: word == foreign) or _first(lambda foreign: foreign.endswith(f".{word}"))


def missing_here(name: str) -> str | None:
    """What a name of another framework is about when there is no setting for it here."""
    return next((NOT_HERE[part] for part in reversed(name.split(".")) if part in NOT_HERE), None)


def _first(fits: Callable[[str], bool]) -> Translation | None:
    for framework, table in TABLES.items():
        for foreign, ours in table.items():
            if fits(foreign):
                return Translation(framework, foreign, tuple(ours.split()))
    return None


_MISSPELT, _ALIKE, _ALIKE_IN_SECTION, _ALIKE_SECTIONS = 0.9, 0.8, 0.7, 0.55
"""Likeness (difflib's ratio) from which a key is suggested: of whole names, alone; of whole names; of whole names in
the section that the user named; and of the sections where the last words are the same. Below, nothing is suggested: a
far-fetched name sends the user the wrong way."""
_MOST_SUGGESTED = 2
_COUNTERPART = {"grpo.num_iterations": "ppo.ppo_epochs", "ppo.ppo_epochs": "grpo.num_iterations"}


def unknown_key(name: str, algorithm: str) -> Problem:
    """The complaint about a key that the schema does not have.

    Args:
        name: name of the unknown key, with its dots.
        algorithm: the one that runs, whose names are suggested.
    """
    if name.split(".")[0] == "hydra":
        return Problem(name, "Hydra's own settings have no effect here; run_dir chooses where a run writes")
    foreign = translated(name)
    if foreign is not None:
        return Problem(name, f"unknown key; {foreign.framework}'s {foreign.name} is {_here(foreign, algorithm)} here")
    missing = missing_here(name)
    if missing is not None:
        return Problem(name, f"unknown key; {missing} is not supported")
    alike = nearest(name, algorithm)
    if alike:
        return Problem(name, f"unknown key; did you mean {' or '.join(alike)}?")
    foreign = loosely_translated(name)
    if foreign is not None:
        return Problem(name, f"unknown key; did you mean {_here(foreign, algorithm)}?")
    return Problem(name, "unknown key; --cfg job shows all keys")


def nearest(name: str, algorithm: str) -> list[str]:
    """The keys that a run of an algorithm has and that are most like a name, best first; none when none is."""
    known = _names_in(algorithm, name)
    misspelt = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    if misspelt:
        return misspelt
    section, word = name.rpartition(".")[0], name.rpartition(".")[2]
    same_word = [key for key in known if key.rpartition(".")[2] == word]
    if section:
        sections = {key.rpartition(".")[0]: key for key in same_word}
        close = difflib.get_close_matches(section, sections, n=1, cutoff=_ALIKE_SECTIONS)
        beside = [key for key in known if key.partition(".")[0] == name.partition(".")[0]]
        return (
            [sections[one] for one in close]
            or difflib.get_close_matches(name, beside, n=_MOST_SUGGESTED, cutoff=_ALIKE_IN_SECTION)
            or difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        )
    if not same_word:
        words = difflib.get_close_matches(word, {key.rpartition(".")[2] for key in known}, n=1, cutoff=_ALIKE)
        same_word = [key for key in known if key.rpartition(".")[2] in words]
    return same_word if len(same_word) <= _MOST_SUGGESTED else []


def _names_in(algorithm: str, name: str) -> list[str]:
    """All keys of a run under the names to suggest: with the user's own name of an environment; without the value
    model's, which are called as the policy's are, unless the user's begins as theirs do."""
    section, _, rest = name.partition(".")
    environment = rest.partition(".")[0] if section == "env" else ""
    own = (key for key in keys() if not key.endswith("<field>"))  # preflight knows those that are passed on
    names = (named_for(algorithm, key) for key in own if not is_foreign_to(algorithm, key))
    names = (one for one in names if section == "value" or not one.startswith("value."))
    return [one.replace("<name>", environment or "NAME") for one in names]


def _here(foreign: Translation, algorithm: str) -> str:
    return " and ".join(_key_here(key, algorithm) for key in foreign.keys)


def _key_here(key: str, algorithm: str) -> str:
    """The key in a run of an algorithm; with what it needs when only the other one reads it."""
    if not is_foreign_to(algorithm, key):
        return named_for(algorithm, key)
    return _COUNTERPART.get(key) or f"{key} (with algorithm={other_than(algorithm)})"
