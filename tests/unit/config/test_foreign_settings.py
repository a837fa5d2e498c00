"""A setting of TRL, NeMo RL or NeMo Customizer is a key here, is told its counterpart, or is unknown."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from megatron_grpo.config.keys import find_key
from megatron_grpo.config.suggestions import NOTHING_ALIKE, describe_counterpart, describe_unknown_key
from megatron_grpo.preflight.script_checks import find_argument_problems
from tests.support.config_problems import problems_of

FILE = Path(__file__).parents[2] / "data" / "foreign_settings.yaml"
PAGES = {page: names.split() for page, names in yaml.safe_load(FILE.read_text()).items()}


@pytest.fixture(scope="module")
def trl() -> Any:
    """The library, which takes seconds to import."""
    return importlib.import_module("trl")


def list_fields(settings: type) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)]


def explain_names(names: list[str], algorithm: str) -> dict[str, str]:
    """What a command line with all of these is told of each, other than keys of the schema."""
    foreign = [name for name in names if find_key(name) is None]
    return problems_of(["+exp=quickstart", f"algorithm={algorithm}", *(f"{name}=1" for name in foreign)])


@pytest.mark.parametrize("page", ["TRL", "NeMo RL", "GrpoParameters", "the installed TRL"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_setting_of_a_page_is_told_what_it_is(page: str, algorithm: str, trl: Any) -> None:
    assert all(PAGES.values())
    names = list_fields(trl.GRPOConfig) if page == "the installed TRL" else PAGES[page]
    section = "ppo." if algorithm == "grpo" else "grpo."
    names = [name for name in names if not name.startswith(section)]
    problems = explain_names(names, algorithm)
    for name in names:
        if find_key(name) is None:
            text = problems.get(name) or problems[f"{name}=1"]
            is_told = describe_counterpart(name, algorithm) is not None or text.endswith(f".{name}?")
            assert is_told or text == NOTHING_ALIKE or name == "debug", name
            assert "is a section" not in text or name == "debug", name


def test_only_settings_without_a_counterpart_are_left_out(trl: Any) -> None:
    """A general argument of transformers may have none; a setting of the algorithm has a key or a reason."""
    general = set(list_fields(transformers.TrainingArguments))
    bare = {
        name
        for name in list_fields(trl.GRPOConfig)
        if find_key(name) is None and describe_counterpart(name, "grpo") is None
    }
    assert bare - general == {
        *("pad_to_multiple_of", "log_multimodal", "log_unique_prompts", "cache_implementation"),
        *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        *(
            "ds3_gather_for_generation",
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
        ),
        "use_transformers_paged",
    }


@pytest.mark.parametrize("name", ["model", "tensor_parallel_size", "gpu_memory_utilization", "dtype"])
def test_options_of_trls_server_have_keys_of_engines(name: str) -> None:
    assert name in list_fields(importlib.import_module("trl.scripts.vllm_serve").ScriptArguments)
    assert describe_counterpart(name, "grpo") is not None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("weight_decay", "TRL's weight_decay is policy.optimizer.weight_decay here"),
        ("adam_beta1", "TRL's adam_beta1 is policy.optimizer.adam_beta1 here"),
        ("adam_beta2", "TRL's adam_beta2 is policy.optimizer.adam_beta2 here"),
        ("adam_epsilon", "TRL's adam_epsilon is policy.optimizer.adam_eps here"),
        ("warmup_steps", "TRL's warmup_steps is policy.optimizer.warmup_steps here"),
        ("warmup_ratio", "TRL's warmup_ratio is policy.optimizer.warmup_ratio here"),
        ("lr_scheduler_type", "TRL's lr_scheduler_type is policy.optimizer.decay_style here"),
        ("kl_penalty_coefficient", "the weight of the KL penalty is loss_fn.reference_policy_kl_penalty here"),
        (
            "environment",
            "env=NAME chooses an option of conf/env, and env.NAME.type sets one; environment is a field of job=FILE",
        ),
        ("tpu_num_cores", "--cfg job shows all keys"),
        ("num_processes", "leave it out, since the run starts its own processes, as many as cluster.num_nodes and pol"),
        (
            "policy.megatron_cfg",
            "NeMo RL's policy.megatron_cfg is policy.megatron here: it takes Megatron-Core's own f",
        ),
        (
            "policy.megatron_cfg.moe_permute_fusion",
            "NeMo RL's policy.megatron_cfg.moe_permute_fusion is policy.megatron",
        ),
        (
            "policy.megatron_cfg.optimizer.decoupled_lr",
            "NeMo RL's policy.megatron_cfg.optimizer.decoupled_lr is policy.megatron_optimizer here",
        ),
        ("value.megatron_cfg.optimizer.lr", "NeMo RL's value.megatron_cfg.optimizer.lr is value.optimizer.lr (with a"),
        ("value.tokenizer.name", "NeMo RL's value.tokenizer.name is policy.model.path here"),
        ("policy.dynamic_batching.x", "--cfg job shows all keys"),
        ("policy.optimizer.kwargs.fused", "it has no counterpart here; leave it out"),
    ],
)
def test_what_is_said_of_a_name(name: str, text: str) -> None:
    assert describe_unknown_key(name, "grpo").text.startswith(f"unknown key; {text}")


@pytest.mark.parametrize("name", ["push_to_hub", "hub_model_id", "hub_private_repo", "push_to_hub_token"])
def test_a_model_is_pushed_while_it_is_trained(name: str) -> None:
    assert "checkpointing.push_to_hub" in describe_unknown_key(name, "grpo").text


def test_the_best_model_is_a_checkpoint_that_is_kept() -> None:
    text = describe_unknown_key("load_best_model_at_end", "grpo").text
    assert "checkpointing.keep_top_k=1" in text
    assert find_key("checkpointing.keep_top_k")
    assert find_key("checkpointing.metric_name")


def test_every_argument_of_trls_trainer_is_told_what_it_is(trl: Any) -> None:
    defaults = {"config": [], "rewards": None, "environments": None, "tokenizer": None, "callbacks": None}
    names = {*inspect.signature(trl.GRPOTrainer.__init__).parameters, *PAGES["TRL's GRPOTrainer"]} - {"self"}
    for name in names - {"train_dataset", "callbacks"}:
        (problem,) = find_argument_problems(**defaults, unknown={name: None})
        assert problem.subject == name
        assert "there is" not in problem.text
        assert "did you mean" not in problem.text, name


def test_a_section_of_another_framework_is_told_setting_by_setting(tmp_path: Path) -> None:
    """In a recipe as in NeMo RL's YAML, and in the form of a command line."""
    answers = {
        "policy.megatron_cfg.tensor_model_parallel_size": "is policy.parallel.tensor here",
        "policy.megatron_cfg.optimizer.lr": "is policy.optimizer.lr here",
        "policy.megatron_cfg.env_vars": "has no counterpart here; leave it out",
    }
    section = {"tensor_model_parallel_size": 2, "optimizer": {"lr": 1e-6}, "env_vars": None}
    recipe = {"defaults": ["quickstart"], "policy": {"megatron_cfg": section}}
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "theirs.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    line = "policy.megatron_cfg={tensor_model_parallel_size: 2, optimizer: {lr: 1e-6}, env_vars: null}"
    for overrides in ([f"--config-dir={tmp_path}", "+exp=theirs"], ["+exp=quickstart", line]):
        problems = problems_of(overrides)
        assert problems.keys() == answers.keys()
        for name, text in answers.items():
            assert problems[name].endswith(text)


def test_a_recipe_without_its_first_line_is_told_the_line(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "plain.yaml").write_text("policy: {model_name: x}\n")
    problems = problems_of([f"--config-dir={tmp_path}", "+exp=plain"])
    assert problems["exp"] == "unknown key; a recipe's file in exp/ begins with the line # @package _global_"
