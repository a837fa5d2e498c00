"""What is suggested for a key that there is not: names of other frameworks, misspelt ones, and nothing far-fetched."""

from __future__ import annotations

import pytest

from megatron_grpo.config.keys import keys, known_key, known_section
from megatron_grpo.config.loop_schema import is_foreign_to
from megatron_grpo.config.suggestions import foreign_names, nearest, unknown_key


def test_every_foreign_name_leads_to_a_key_of_the_schema() -> None:
    tables = foreign_names()
    assert tables.keys() == {"TRL", "NeMo RL", "verl", "none"}
    for framework, table in tables.items():
        assert isinstance(table, dict)
        for foreign, names in table.items():
            assert known_key(foreign) is None, f"{foreign} is a key here and needs no translation"
            for name in names.split() if framework != "none" else ():
                assert known_key(name) or known_section(name), f"{foreign} -> {name}"


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("learning_rate", "policy.optimizer.lr"),
        ("beta", "loss_fn.reference_policy_kl_penalty"),
        ("epsilon", "loss_fn.ratio_clip_min and loss_fn.ratio_clip_max"),
        ("num_generations", "grpo.num_generations_per_prompt"),
        ("report_to", "logger.wandb.enabled and logger.tensorboard and logger.mlflow.enabled"),
        ("resume_from_checkpoint", "checkpointing.resume"),
        ("log_completions", "logger.log_completions"),
        ("data.dataset_name", "data.train_path"),
        ("megatron_cfg.tensor_model_parallel_size", "policy.parallel.tensor"),
        ("policy.megatron_cfg.tensor_model_parallel_size", "policy.parallel.tensor"),
        ("checkpointing.checkpoint_dir", "run_dir"),
        ("max_prompt_length", "data.max_input_seq_length"),
        ("max_steps", "grpo.max_num_steps"),
        ("actor_rollout_ref.rollout.n", "grpo.num_generations_per_prompt"),
        ("algorithm.kl_ctrl.kl_coef", "loss_fn.reference_policy_kl_penalty"),
        ("lora_r", "policy.lora.rank"),
        ("policy.megatron_cfg.peft.dim", "policy.lora.rank"),
        ("algorithm.gamma", "ppo.adv_estimator.gae_gamma (with algorithm=ppo)"),
    ],
)
def test_names_of_other_frameworks_are_translated(name: str, here: str) -> None:
    problem = unknown_key(name, "grpo")
    assert problem.subject == name
    assert problem.text.endswith(f" is {here} here")


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("max_steps", "ppo.max_num_steps"),
        ("num_iterations", "ppo.ppo_epochs"),
        ("scale_rewards", "grpo.normalize_rewards (with algorithm=grpo)"),
        ("critic.optim.lr", "value.optimizer.lr"),
    ],
)
def test_a_run_of_ppo_is_told_its_own_names(name: str, here: str) -> None:
    assert unknown_key(name, "ppo").text.endswith(f" is {here} here")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("grpo.num_prompt_per_step", ["grpo.num_prompts_per_step"]),
        ("ppo.num_prompt_per_step", ["grpo.num_prompts_per_step"]),
        ("num_prompts", []),
        ("max_num_step", ["grpo.max_num_steps"]),
        ("policy.tensor", ["policy.parallel.tensor"]),
        ("lr", ["policy.optimizer.lr"]),
        ("value.optimiser.lr", ["policy.optimizer.lr"]),
        ("env.code.tipe", ["env.code.type"]),
        ("data.path", ["data.val_path", "data.train_path"]),
        ("policy.megatron_cfg.enabled", []),
        ("foo.bar.enabled", []),
        ("enabled", []),
        ("qqq", []),
    ],
)
def test_what_is_like_a_name_in_a_run_of_grpo(name: str, suggested: list[str]) -> None:
    assert nearest(name, "grpo") == suggested


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_nothing_is_suggested_that_would_be_refused(algorithm: str) -> None:
    for name in keys():
        for typo in (f"{name}s", name.replace("_", "-"), name.rpartition(".")[2], name[:-1]):
            found = nearest(typo, algorithm)
            assert [one for one in found if known_key(one) is None or is_foreign_to(algorithm, one)] == [], typo


def test_what_there_is_not_is_said_not_to_be_there() -> None:
    for name in ("load_in_4bit", "policy.model.load_in_8bit"):
        assert unknown_key(name, "grpo").text == "unknown key; quantised training is not supported"


def test_what_is_like_nothing_is_left_alone() -> None:
    assert unknown_key("qqq", "grpo").text == "unknown key; --cfg job shows all keys"
