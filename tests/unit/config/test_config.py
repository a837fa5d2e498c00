"""Composing and checking a configuration: recipes, defaults, and one test for each kind of mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_grpo.config.overrides import RECIPES, config_groups
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config, load_config
from tests.support.config_problems import problems_of


def test_composed_defaults_are_the_defaults_of_the_schema(given: list[str]) -> None:
    config, expected = load_config(given), Config()
    expected.policy.model.path = config.policy.model.path
    expected.data.train_path = config.data.train_path
    expected.run_dir = config.run_dir
    expected.prepare.folder = config.prepare.folder
    expected.cluster.gpus_per_node = config.cluster.gpus  # left open, it is what this machine has
    assert config == expected


OPTIONS = [(group, option) for group, found in config_groups().items() if group != RECIPES for option in found]
OF_THE_MIXTURE = [
    "data=addition_moe",
    "env=addition",
    "data.max_input_seq_length=16",
    "policy.model.path=${prepare.folder}/model",
]
GOES_WITH = {  # options that make sense only beside others
    ("data", "addition"): ["env=addition"],
    ("data", "addition_moe"): ["env=addition"],
    ("data", "calculator"): ["env=calculator"],
    ("data", "two_tasks"): ["env=two_tasks"],
    ("data", "tldr"): ["env.tldr={type:reward_functions,reward_funcs:[mine.reward]}"],
    ("data", "countdown"): ["env.countdown={type:reward_functions,reward_funcs:[mine.reward]}"],
    ("env", "addition"): ["data.task_name=addition"],
    ("env", "calculator"): ["data.task_name=tools"],
    ("env", "two_tasks"): ["data.task_name=addition"],
    ("checkpointing", "best"): ["data.val_path=val.jsonl"],
    ("policy", "addition"): ["generation=addition", "data.max_input_seq_length=16"],
    ("generation", "addition_moe"): ["policy=addition_moe", *OF_THE_MIXTURE],
    ("policy", "addition_moe"): ["generation=addition", *OF_THE_MIXTURE],
    ("policy", "llama3_70b"): ["policy.model.path=meta-llama/not-in-the-cache"],
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
    assert list(compose_config([*recipe, sets]).data.training) == ["data.train_sets.sums.path"]
    problems = problems_of([*recipe, sets, "data.train_path=b.jsonl"])
    assert problems == {"data.train_path=b.jsonl": "and data.train_sets say the same; give one of them"}


def test_all_mistakes_come_in_one_message(given: list[str]) -> None:
    problems = problems_of([*given, "policy.parallel.tensor=3", "grpo.num_prompt_per_step=4", "policy.precision=fp8"])
    assert problems == {
        "grpo.num_prompt_per_step": "unknown key; did you mean grpo.num_prompts_per_step?",
        "policy.precision=fp8": "must be one of float32, bfloat16",
        "policy.parallel.tensor=3": "does not divide the model's 8 attention heads; use 1, 2, 4 or 8",
    }


def test_an_unknown_key_hides_no_other_mistake(given: list[str]) -> None:
    """Its name may be part of another key's; of a wrong value's default, on the other hand, nothing is said."""
    assert problems_of([*given, "lr=3", "policy.optimizer.min_lr=1"]).keys() == {"lr", "policy.optimizer.min_lr=1"}
    assert problems_of([*given, "policy.optimizer.lr=nan", "policy.optimizer.min_lr=1"]).keys() == {
        "policy.optimizer.lr=nan"
    }


@pytest.mark.parametrize(
    ("override", "subject", "text"),
    [
        (
            "+grpo.num_generation_per_prompt=4",
            "grpo.num_generation_per_prompt",
            "grpo.num_generations_per_prompt?",
        ),
        ("++lr=1", "lr", "did you mean policy.optimizer.lr?"),
        ("policy.tensor=2", "policy.tensor", "did you mean policy.parallel.tensor?"),
        ("env.math.tipe=math", "env.math.tipe", "did you mean env.math.type?"),
        ("qqq=1", "qqq", "unknown key"),
        ("hydra.run.dir=x", "hydra.run.dir", "run_dir chooses"),
        ("+exp=quikstart", "exp=quikstart", "did you mean quickstart? there is llama3_70b_slurm, quickstart"),
        ("loss_fn=ppo", "loss_fn=ppo", "no such option; there is clip_higher, no_kl"),
        ("loss_fn=null", "loss_fn=null", "no such option; there is clip_higher, no_kl"),
        ("grpo=3", "grpo=3", "set one of its keys: num_prompts_per_step"),
        ("env.math=null", "env.math=null", "set one of its keys: type, reward_funcs"),
        ("a b", "a b", "write key=value"),
        ("grpo.seed=", None, "must be int"),
        ("grpo.seed=1,2", "grpo.seed=1,2", "lists are written [a,b]"),
        ("grpo.max_num_steps=three", "grpo.max_num_steps=three", "must be int > 0"),
        ("grpo.max_num_steps=0", "grpo.max_num_steps=0", "must be int > 0"),
        ("generation.top_p=1.5", "generation.top_p=1.5", "must be float > 0 and <= 1"),
        (
            "generation.stop_token_ids=[1,x]",
            "generation.stop_token_ids.1=x",
            "is an element of what must be list of int",
        ),
        ("data.train_path=[a,b]", None, "; several sets are data.train_sets.NAME.path="),
        ("env.on_reward_error=none", "env.on_reward_error=none", "is env.NAME.on_reward_error; NAME is an environment"),
        ("grpo.max_num_steps=true", "grpo.max_num_steps=True", "must be int > 0"),
        ("policy.max_grad_norm=false", "policy.max_grad_norm=False", "must be float >= 0"),
        ("grpo.seed=9223372036854775808", "grpo.seed=9223372036854775808", "must be int >= 0"),
        ("policy.optimizer.lr=nan", "policy.optimizer.lr=nan", "must be float > 0"),
        ("policy.optimizer.lr=null", "policy.optimizer.lr=null", "must be float > 0"),
        ("data.prompt_key=${nowhere}", "data.prompt_key=${nowhere}", "cannot be resolved"),
        ("data.train_path=???", "data.train_path", "is required: JSONL file"),
    ],
)
def test_mistakes_in_overrides(given: list[str], override: str, subject: str | None, text: str) -> None:
    ((found, message),) = problems_of([*given, override]).items()
    assert subject is None or found == subject
    assert text in message


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["policy.parallel.tensor=16"], "policy.parallel.tensor=16", "8 attention heads; use 1, 2, 4 or 8"),
        (["generation.parallel.tensor=6"], "generation.parallel.tensor=6", "8 attention heads; use 1, 2, 4 or 8"),
        (["policy.parallel.pipeline=3"], "policy.parallel.pipeline=3", "4 layers; use 1, 2 or 4"),
        (["generation.parallel.pipeline=3"], "generation.parallel.pipeline=3", "4 layers; use 1, 2 or 4"),
        (["policy.parallel.expert=2"], "policy.parallel.expert=2", "the model has no experts; use 1"),
        (["policy.parallel.sequence=true"], "policy.parallel.sequence=True", "needs policy.parallel.tensor > 1"),
        (["policy.parallel.data=3"], "policy.parallel.data=3", "32 prompts x 16 generations = 512 samples"),
        (["generation.parallel.data=3"], "generation.parallel.data=3", "do not share out evenly over 3 engines"),
        (["grpo.num_generations_per_prompt=1"], "grpo.num_generations_per_prompt=1", "use 2 or more"),
        (["generation.max_new_tokens=1025"], "policy.max_total_sequence_length=2048", "1024 + 1025 = 2049 tokens"),
        (
            ["policy.max_total_sequence_length=8193", "policy.microbatch_tokens=9000"],
            "policy.max_total_sequence_length=8193",
            "8192 positions",
        ),
        (["policy.microbatch_tokens=2047"], "policy.microbatch_tokens=2047", "longest sequence"),
        (["policy.logprob_microbatch_tokens=9"], "policy.logprob_microbatch_tokens=9", "longest sequence"),
        (["policy.optimizer.min_lr=1"], "policy.optimizer.min_lr=1", "above policy.optimizer.lr=1e-06"),
        (
            [
                "policy.optimizer.decay_style=cosine",
                "policy.optimizer.warmup_steps=1000",
                "policy.optimizer.decay_steps=1000",
            ],
            "policy.optimizer.warmup_steps=1000",
            "ends at step 1000",
        ),
        (["data.task_name=code"], "data.task_name=code", "there is math"),
        (
            ["data.system_prompt_file=hi.txt", "data.apply_chat_template=false"],
            "data.system_prompt_file",
            "apply_chat_template=true",
        ),
        (["data.system_prompt=hi", "data.apply_chat_template=false"], "data.system_prompt", "apply_chat_template=true"),
        (
            ["data.tasks.math.system_prompt=hi", "data.apply_chat_template=false"],
            "data.tasks.math.system_prompt",
            "needs data.tasks.math.apply_chat_template=true",
        ),
        (["generation.stop_strings=['']"], "generation.stop_strings", "holds an empty text"),
        (
            ["checkpointing.keep_top_k=2", "checkpointing.metric_name=val_acuracy"],
            "checkpointing.metric_name=val_acuracy",
            "there is val_accuracy, val_reward",
        ),
        (["checkpointing.keep_top_k=2"], "checkpointing.metric_name=val_accuracy", "there is no validation"),
        (
            ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=2"],
            "grpo.reward_scaling.source_min=2",
            "must be below",
        ),
        (
            ["cluster.gpus_per_node=8", "policy.parallel.data=8"],
            "cluster.gpus_per_node=8",
            "1 node(s) have 8 GPUs, but policy.parallel takes 8 and generation.parallel 1",
        ),
    ],
)
def test_what_does_not_fit_together(given: list[str], overrides: list[str], subject: str, text: str) -> None:
    ((found, message),) = problems_of([*given, *overrides]).items()
    assert found == subject
    assert text in message


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
