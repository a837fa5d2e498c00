"""What is suggested for a key that there is not: names of other frameworks, misspelt ones, and nothing far-fetched."""

from __future__ import annotations

import pytest

from megatron_grpo.config.keys import find_key, is_section, read_keys
from megatron_grpo.config.loop_names import list_readers
from megatron_grpo.config.suggestions import (
    NONE,
    NOTHING_ALIKE,
    describe_unknown_key,
    find_similar_keys,
    load_foreign_names,
)


def test_every_foreign_name_leads_to_a_key_of_the_schema() -> None:
    tables = load_foreign_names()
    assert tables.keys() == {"TRL", "NeMo RL", "verl", NONE, "GrpoParameters"}
    for framework, table in tables.items():
        assert isinstance(table, dict)
        for foreign, names in table.items():
            assert find_key(foreign) is None, f"{foreign} is a key here and needs no translation"
            for setting in names.partition("; ")[0].split() if framework != NONE else ():
                name = setting.partition("=")[0]
                assert find_key(name) or is_section(name), f"{foreign} -> {name}"


@pytest.mark.parametrize(
    ("name", "our_key"),
    [
        ("learning_rate", "policy.optimizer.lr"),
        ("beta", "loss_fn.reference_policy_kl_penalty"),
        ("epsilon", "loss_fn.ratio_clip_min and loss_fn.ratio_clip_max"),
        ("num_generations", "grpo.num_generations_per_prompt"),
        (
            "report_to",
            "logger.wandb.enabled and logger.tensorboard and logger.mlflow.enabled and logger.swanlab.enabled",
        ),
        ("resume_from_checkpoint", "checkpointing.resume"),
        ("log_completions", "logger.log_completions"),
        ("data.dataset_name", "data.train_path"),
        ("megatron_cfg.tensor_model_parallel_size", "policy.parallel.tensor"),
        ("policy.megatron_cfg.tensor_model_parallel_size", "policy.parallel.tensor"),
        ("checkpointing.checkpoint_dir", "run_dir"),
        ("max_prompt_length", "data.max_input_seq_length"),
        ("actor_rollout_ref.rollout.n", "grpo.num_generations_per_prompt"),
        ("algorithm.kl_ctrl.kl_coef", "loss_fn.reference_policy_kl_penalty"),
        ("lora_r", "policy.lora.rank"),
        ("policy.megatron_cfg.peft.dim", "policy.lora.rank"),
        ("algorithm.gamma", "ppo.adv_estimator.gae_gamma (with algorithm=ppo)"),
    ],
)
def test_names_of_other_frameworks_are_translated(name: str, our_key: str) -> None:
    problem = describe_unknown_key(name, "grpo")
    assert problem.subject == name
    assert problem.text.endswith(f" is {our_key} here")


@pytest.mark.parametrize(
    ("name", "our_key"),
    [
        ("eval_steps", "ppo.val_period"),
        ("num_iterations", "ppo.ppo_epochs"),
        ("scale_rewards", "grpo.normalize_rewards (with algorithm=grpo)"),
        ("critic.optim.lr", "value.optimizer.lr"),
    ],
)
def test_a_run_of_ppo_is_told_its_own_names(name: str, our_key: str) -> None:
    assert describe_unknown_key(name, "ppo").text.endswith(f" is {our_key} here")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("grpo.num_prompt_per_step", ["grpo.num_prompts_per_step"]),
        ("ppo.num_prompt_per_step", ["grpo.num_prompts_per_step"]),
        ("num_prompts", []),
        ("max_num_step", ["grpo.max_num_steps"]),
        ("policy.tensor", []),
        ("generation.enabled", []),
        ("lr", []),
        ("parameters", []),
        ("value.optimiser.lr", []),
        ("policy.optimiser.lr", ["policy.optimizer.lr"]),
        ("env.code.tipe", ["env.code.type"]),
        ("data.path", []),
        ("policy.megatron_cfg.enabled", []),
        ("foo.bar.enabled", []),
        ("enabled", []),
        ("qqq", []),
    ],
)
def test_what_is_like_a_name_in_a_run_of_grpo(name: str, suggested: list[str]) -> None:
    assert find_similar_keys(name, "grpo") == suggested


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_nothing_is_suggested_that_would_be_refused(algorithm: str) -> None:
    for name in read_keys():
        for typo in (f"{name}s", name.replace("_", "-"), name.rpartition(".")[2], name[:-1]):
            similar_keys = find_similar_keys(typo, algorithm)
            assert [key for key in similar_keys if find_key(key) is None or algorithm not in list_readers(key)] == [], (
                typo
            )


def test_what_there_is_not_is_said_not_to_be_there() -> None:
    for name in ("load_in_4bit", "load_in_8bit"):
        assert describe_unknown_key(name, "grpo").text == "unknown key; quantised training is not supported"


OPTIMIZER_STEPS = "TRL counts optimizer steps, and a step here may have several"
OPTIMIZERS = "policy.optimizer.name is adamw or muon; other optimizers are not supported"
MEGATRON = "leave it out, since Megatron-Core trains every model"
VLLM = "leave it out, since vLLM always generates"
IN_FLIGHT = "grpo.async_grpo.enabled here: weights always change under responses in flight"
SPLITS = "policy.parallel and policy.optimizer.distributed here: Megatron-Core splits the model"
TOKENIZER = "policy.model.path here: the tokenizer is in the folder of the model"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("policy.tokenizer.name", f"NeMo RL's policy.tokenizer.name is {TOKENIZER}"),
        ("tokenizer.name", f"NeMo RL's policy.tokenizer.name is {TOKENIZER}"),
        ("policy.megatron_cfg.enabled", MEGATRON),
        ("policy.dtensor_cfg.enabled", MEGATRON),
        (
            "policy.dynamic_batching.enabled",
            "leave it out, since microbatches are always filled up to policy.microbatch_tokens",
        ),
        ("mp_parameters", "TRL's mp_parameters is policy.parallel here"),
        ("data.output_key", "NeMo RL's data.output_key is data.answer_key here"),
        ("fp16", "float16 is not supported; policy.precision is bfloat16 or float32"),
        ("vllm_server_host", "TRL's vllm_server_host is generation.server.urls here: each is http://HOST:PORT"),
        ("vllm_server_port", "TRL's vllm_server_port is generation.server.urls here: each is http://HOST:PORT"),
        ("vllm_server_timeout", "TRL's vllm_server_timeout is generation.server.timeout_s here"),
        ("use_vllm", VLLM),
        ("vllm_device", "TRL's vllm_device is generation.placement here: Ray gives engines their devices"),
        ("metric_for_best_model", "TRL's metric_for_best_model is checkpointing.metric_name here"),
        ("greater_is_better", "TRL's greater_is_better is checkpointing.higher_is_better here"),
        (
            "gradient_checkpointing_kwargs",
            "TRL's gradient_checkpointing_kwargs is policy.recompute_modules here",
        ),
        ("evaluation_strategy", "TRL's evaluation_strategy is grpo.val_period here"),
        ("do_eval", "TRL's do_eval is grpo.val_period here"),
        ("do_train", "TRL's do_train is debug.train here"),
        (
            "overwrite_output_dir",
            "TRL's overwrite_output_dir is checkpointing.resume here: with none a run begins anew, in a run_dir "
            "without checkpoints",
        ),
        ("logging_steps", "leave it out, since every step is logged"),
        ("disable_tqdm", "TRL's disable_tqdm is logger.progress here: false is quiet"),
        ("log_level", "TRL's log_level is logger.level here"),
        ("full_determinism", "TRL's full_determinism is policy.deterministic here"),
        ("ddp_timeout", "TRL's ddp_timeout is policy.timeout_s here"),
        (
            "ddp_bucket_cap_mb",
            "TRL's ddp_bucket_cap_mb is policy.ddp.bucket_size here: it counts parameters, not bytes",
        ),
        ("deepspeed", f"TRL's deepspeed is {SPLITS}"),
        ("fsdp", f"TRL's fsdp is {SPLITS}"),
        ("tp_size", "TRL's tp_size is policy.parallel.tensor here"),
        ("data_seed", "TRL's data_seed is grpo.seed here"),
        ("use_cpu", "TRL's use_cpu is cluster.gpus_per_node=0 here"),
        ("model_init_kwargs", "TRL's model_init_kwargs is policy.precision and policy.megatron here"),
        ("eval_dataset", "TRL's eval_dataset is data.val_path here"),
        (
            "processing_class",
            "the tokenizer is in the folder of the model; megatron_grpo.train takes another one as tokenizer",
        ),
        (
            "peft_config",
            "TRL's peft_config is policy.lora.rank and policy.lora.alpha and policy.lora.target_modules here",
        ),
        ("optim", OPTIMIZERS),
        ("use_rloo", "GrpoParameters's use_rloo is grpo.use_leave_one_out_baseline here"),
        (
            "generation_pipeline_parallel_size",
            "GrpoParameters's generation_pipeline_parallel_size is generation.parallel.pipeline here",
        ),
        ("in_flight_weight_updates", f"NeMo RL's in_flight_weight_updates is {IN_FLIGHT}"),
        (
            "grpo.async_grpo.in_flight_weight_updates",
            f"NeMo RL's grpo.async_grpo.in_flight_weight_updates is {IN_FLIGHT}",
        ),
        ("policy.tokenizer.chat_template", "NeMo RL's policy.tokenizer.chat_template is data.chat_template here"),
        (
            "policy.tokenizer.chat_template_kwargs",
            "NeMo RL's policy.tokenizer.chat_template_kwargs is data.chat_template_kwargs here",
        ),
        ("policy.generation.vllm_cfg.async_engine", "leave it out, since engines are always asynchronous"),
        ("policy.generation.backend", VLLM),
        (
            "generation_batch_size",
            "TRL's generation_batch_size is grpo.num_prompts_per_step and grpo.num_generations_per_prompt here: it is "
            "their product, and generation.generation_batch_size limits the responses that are decoded together",
        ),
        ("max_steps", f"TRL's max_steps is grpo.max_num_steps here: {OPTIMIZER_STEPS}"),
        ("ref_model_sync_steps", f"TRL's ref_model_sync_steps is grpo.ref_model_sync_steps here: {OPTIMIZER_STEPS}"),
        (
            "save_total_limit",
            "TRL's save_total_limit is checkpointing.keep_top_k and checkpointing.metric_name=null here: without a "
            "metric the newest are kept",
        ),
    ],
)
def test_every_name_has_its_own_suggestion(name: str, text: str) -> None:
    assert describe_unknown_key(name, "grpo").text == f"unknown key; {text}"


@pytest.mark.parametrize("name", ["sampler.name", "my.path", "policy.model.learning_rate", "engine.enabled"])
def test_the_last_word_of_a_name_suggests_nothing(name: str) -> None:
    assert describe_unknown_key(name, "grpo").text == NOTHING_ALIKE


def test_what_is_like_nothing_is_left_alone() -> None:
    assert describe_unknown_key("qqq", "grpo").text == "unknown key; --cfg job shows all keys"
