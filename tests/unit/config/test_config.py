"""Composing and checking a configuration: recipes, defaults, and one test for each kind of mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_grpo.config.overrides import RECIPES, list_config_groups
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config, load_config
from tests.support.config_problems import setting_problems_of


def test_composed_defaults_are_the_defaults_of_the_schema(given: list[str]) -> None:
    config, expected = load_config(given), Config()
    expected.policy.model.path = config.policy.model.path
    expected.data.train_path = config.data.train_path
    expected.run_dir = config.run_dir
    expected.prepare.folder = config.prepare.folder
    expected.cluster.gpus_per_node = config.cluster.gpus  # left open, it is what this machine has
    assert config == expected


OPTIONS = [(group, option) for group, found in list_config_groups().items() if group != RECIPES for option in found]
OF_THE_MIXTURE = [
    "data=addition_moe",
    "env=addition",
    "data.max_input_seq_length=16",
    "policy.model.path=${prepare.folder}/model",
]
OF_THE_HYBRID = ["data=addition_hybrid", *OF_THE_MIXTURE[1:]]
GOES_WITH = {  # options that make sense only beside others
    ("data", "addition"): ["env=addition"],
    ("data", "addition_moe"): ["env=addition"],
    ("data", "addition_hybrid"): ["env=addition", "generation=addition_hybrid"],
    ("data", "reasoning_gym"): ["env=reasoning_gym"],
    ("data", "calculator"): ["env=calculator"],
    ("data", "two_tasks"): ["env=two_tasks"],
    ("data", "tldr"): ["env.tldr={type:reward_functions,reward_funcs:[mine.reward]}"],
    ("data", "countdown"): ["env.countdown={type:reward_functions,reward_funcs:[mine.reward]}"],
    ("env", "addition"): ["data.task_name=addition"],
    ("env", "reasoning_gym"): ["data.task_name=reasoning_gym"],
    ("env", "calculator"): ["data.task_name=tools"],
    ("env", "two_tasks"): ["data.task_name=addition"],
    ("checkpointing", "best"): ["data.val_path=val.jsonl"],
    ("policy", "addition"): ["generation=addition", "data.max_input_seq_length=16"],
    ("generation", "addition_moe"): ["policy=addition_moe", *OF_THE_MIXTURE],
    ("generation", "addition_hybrid"): ["policy=addition_hybrid", *OF_THE_HYBRID],
    ("policy", "addition_hybrid"): ["generation=addition_hybrid", *OF_THE_HYBRID],
    ("policy", "addition_moe"): ["generation=addition", *OF_THE_MIXTURE],
    ("policy", "experts_on_gpus"): ["policy.model.path=some/hub-model"],
    ("generation", "thinking"): ["policy.model.path=some/hub-model", "policy.microbatch_tokens=16384"],
    ("algorithm", "distillation"): ["teacher.model.path=some/hub-model"],
    ("generation", "long_32k"): ["policy.model.path=some/hub-model"],
    ("generation", "long_128k"): ["policy.model.path=some/hub-model"],
    ("task", "math"): ["env=math"],
    ("precision", "fp8"): ["cluster.gpus_per_node=8", "policy.precision=bfloat16", "policy.model.path=some/hub-model"],
    ("precision", "fp8_engines"): ["policy.precision=bfloat16", "policy.model.path=some/hub-model"],
}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(given: list[str], group: str, option: str) -> None:
    chosen = compose_config([*given, f"{group}={option}", *GOES_WITH.get((group, option), [])])
    assert chosen != compose_config(given) or (group, option) in (("env", "math"), ("algorithm", "grpo"))


def test_an_environment_that_is_named_takes_the_place_of_the_default_one(given: list[str]) -> None:
    def types(*overrides: str) -> dict[str, str]:
        return {name: one.type for name, one in compose_config([*given, *overrides]).env.items()}

    mine = ("env.my_task.type=my_pkg.envs:MyEnv", "data.task_name=my_task")
    assert types() == {"math": "math"}
    assert types(*mine) == {"my_task": "my_pkg.envs:MyEnv"}
    assert types("env=math", *mine) == {"math": "math", "my_task": "my_pkg.envs:MyEnv"}
    assert types(mine[0]) == {"my_task": "my_pkg.envs:MyEnv", "math": "math"}, "for rows that name no task"
    assert types("env.math.num_workers=2") == {"math": "math"}


def test_training_sets_on_the_command_line_take_the_place_of_the_recipes_single_one(given: list[str]) -> None:
    sets = "data.train_sets={sums:{path:a.jsonl}}"
    recipe = ["+exp=qwen3_8b_8gpu", "policy.model.path=m"]
    assert list(compose_config([*recipe, sets]).data.training_sets) == ["data.train_sets.sums.path"]
    problems = setting_problems_of([*recipe, sets, "data.train_path=b.jsonl"])
    assert problems == {"data.train_path=b.jsonl": "and data.train_sets say the same; give one of them"}


def test_an_environment_variable_and_the_time_are_filled_in(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "/tmp/mine")
    config = load_config([*given, "run_dir=${oc.env:MINE}/${now:%Y}/${name}"])
    assert config.run_dir.startswith("/tmp/mine/20")
    assert config.run_dir.endswith("/grpo")


def test_the_configuration_is_read_without_the_heavy_packages(given: list[str]) -> None:
    code = (
        "import sys; from megatron_grpo.preflight.load import load_config; load_config(sys.argv[1:]); "
        "print([m for m in ('torch', 'ray', 'megatron', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
