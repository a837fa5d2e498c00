"""Recipes compose, of the package and of other folders; defaults, reference page and documented tables are true."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.configuration_page import format_page
from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.keys import read_keys, read_sections
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.metric_names import list_optional_metrics, list_possible_metrics, list_step_metrics
from megatron_grpo.config.overrides import RECIPES, list_config_groups
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config, load_config
from tests.support.config_problems import problems_of, setting_problems_of
from tests.support.documents import METRICS, undocumented


def test_composed_defaults_are_the_defaults_of_the_schema(base_overrides: list[str]) -> None:
    config, expected = load_config(base_overrides), Config()
    expected.policy.model.path = config.policy.model.path
    expected.data.train_path = config.data.train_path
    expected.run_dir = config.run_dir
    expected.prepare.folder = config.prepare.folder
    expected.cluster.gpus_per_node = config.cluster.gpus  # left open, it is what this machine has
    assert config == expected


OPTIONS = [(group, option) for group, names in list_config_groups().items() if group != RECIPES for option in names]
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
    ("data", "counting"): ["env=counting", "generation=counting", "policy=counting", "policy.model.path=a/b"],
    ("data", "tldr"): ["env.tldr={type:reward_functions,reward_funcs:[mine.reward]}"],
    ("data", "countdown"): ["env.countdown={type:reward_functions,reward_funcs:[mine.reward]}"],
    ("env", "addition"): ["data.task_name=addition"],
    ("env", "reasoning_gym"): ["data.task_name=reasoning_gym"],
    ("env", "calculator"): ["data.task_name=tools"],
    ("env", "two_tasks"): ["data.task_name=addition"],
    ("checkpointing", "best"): ["data.val_path=val.jsonl"],
    ("checkpointing", "large"): ["data.val_path=val.jsonl"],
    ("policy", "addition"): ["generation=addition", "data.max_input_seq_length=16"],
    ("generation", "addition_moe"): ["policy=addition_moe", *OF_THE_MIXTURE],
    ("generation", "addition_hybrid"): ["policy=addition_hybrid", *OF_THE_HYBRID],
    ("policy", "addition_hybrid"): ["generation=addition_hybrid", *OF_THE_HYBRID],
    ("policy", "addition_moe"): ["generation=addition", *OF_THE_MIXTURE],
    ("policy", "counting"): ["data.max_input_seq_length=32", "generation.max_new_tokens=8"],
    ("policy", "experts_on_gpus"): ["policy.model.path=some/hub-model"],
    ("generation", "thinking"): ["policy.model.path=some/hub-model", "policy.microbatch_tokens=16384"],
    ("algorithm", "distillation"): ["teacher.model.path=some/hub-model"],
    ("algorithm", "self_distillation"): ['distillation.hint_prompt="{answer} {}"'],
    ("algorithm", "chord"): ["chord.train_path=experts.jsonl"],
    ("generation", "long_32k"): ["policy.model.path=some/hub-model"],
    ("generation", "long_128k"): ["policy.model.path=some/hub-model"],
    ("task", "math"): ["env=math"],
    ("precision", "fp8"): ["cluster.gpus_per_node=8", "policy.precision=bfloat16", "policy.model.path=some/hub-model"],
    ("precision", "fp8_engines"): ["policy.precision=bfloat16", "policy.model.path=some/hub-model"],
}


@pytest.mark.turns(3)
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_composes(base_overrides: list[str], group: str, option: str) -> None:
    chosen = compose_config([*base_overrides, f"{group}={option}", *GOES_WITH.get((group, option), [])])
    assert chosen != compose_config(base_overrides) or (group, option) in (("env", "math"), ("algorithm", "grpo"))


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "async_grpo"])
def test_a_run_without_a_recipe_is_named_after_its_algorithm(algorithm: str) -> None:
    values = compose_typed([f"algorithm={algorithm}"]).values
    name = "grpo" if algorithm == "async_grpo" else algorithm
    assert values["name"] == name
    assert values["run_dir"].startswith(f"outputs/{name}/")
    values = compose_typed(["+exp=quickstart_dpo", f"algorithm={algorithm}"]).values
    assert values["name"] == "quickstart_dpo"
    assert compose_typed([f"algorithm={algorithm}", "name=mine"]).values["run_dir"].startswith("outputs/mine/")


def test_an_algorithm_of_the_users_own_names_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import dataclasses\nfrom megatron_grpo.config.algorithms import ALGORITHMS\n"
    (tmp_path / "named_recipe.py").write_text(f"{text}MINE = dataclasses.replace(ALGORITHMS['dpo'], name='margins')\n")
    monkeypatch.chdir(tmp_path)
    assert compose_typed(["algorithm=named_recipe:MINE"]).values["run_dir"].startswith("outputs/margins/")


def test_an_environment_that_is_named_takes_the_place_of_the_default_one(base_overrides: list[str]) -> None:
    def types(*overrides: str) -> dict[str, str]:
        return {
            name: environment.type for name, environment in compose_config([*base_overrides, *overrides]).env.items()
        }

    task_overrides = ("env.my_task.type=my_pkg.envs:MyEnv", "data.task_name=my_task")
    assert types() == {"math": "math"}
    assert types(*task_overrides) == {"my_task": "my_pkg.envs:MyEnv"}
    assert types("env=math", *task_overrides) == {"math": "math", "my_task": "my_pkg.envs:MyEnv"}
    assert types(task_overrides[0]) == {"my_task": "my_pkg.envs:MyEnv", "math": "math"}, "for rows that name no task"
    assert types("env.math.num_workers=2") == {"math": "math"}


def test_training_sets_on_the_command_line_take_the_place_of_the_recipes_single_one(base_overrides: list[str]) -> None:
    sets = "data.train_sets={sums:{path:a.jsonl}}"
    recipe = ["+exp=qwen3_8b_8gpu", "policy.model.path=m"]
    assert list(compose_config([*recipe, sets]).data.training_sets) == ["data.train_sets.sums.path"]
    problems = setting_problems_of([*recipe, sets, "data.train_path=b.jsonl"])
    assert problems == {"data.train_path=b.jsonl": "and data.train_sets both name training rows; give one of them"}


def test_an_environment_variable_and_the_time_are_filled_in(
    base_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "/tmp/mine")
    config = load_config([*base_overrides, "run_dir=${oc.env:MINE}/${now:%Y}/${name}"])
    assert config.run_dir.startswith("/tmp/mine/20")
    assert config.run_dir.endswith("/grpo")


def test_the_configuration_is_read_without_the_heavy_packages(base_overrides: list[str]) -> None:
    code = (
        "import sys; from megatron_grpo.preflight.load import load_config; load_config(sys.argv[1:]); "
        "print([m for m in ('torch', 'ray', 'megatron', 'vllm', 'transformers') if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code, *base_overrides], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


ROOT = Path(__file__).parents[3]


def test_every_key_and_section_is_documented() -> None:
    assert [key.name for key in read_keys().values() if not key.doc] == []


def test_documented_defaults_are_those_of_the_schema() -> None:
    config: Any = Config(**{loop: section() for loop, section in LOOPS.items()})  # type: ignore[arg-type]
    for name, key in read_keys().items():
        if "<" not in name:
            assert functools.reduce(getattr, name.split("."), config) == key.default, name
    assert [group.name for group in read_sections() if not group.doc] == []


@pytest.mark.turns(3)
@pytest.mark.parametrize("recipe", list_config_groups()[RECIPES])
def test_every_recipe_composes(recipe: str) -> None:
    assert compose_config([f"+exp={recipe}"]).name == recipe


@pytest.mark.parametrize("recipe", ["qwen3_8b_8gpu", "llama3_70b_slurm", "qwen3_1_7b_one_gpu"])
def test_without_gpus_the_first_line_says_so(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_config([f"+exp={recipe}"])
    problem, *more_problems = caught.value.problems
    assert problem.text.startswith("this machine has no CUDA GPU")
    assert {further.key for further in more_problems} >= {"data.train_path", "data.val_path"}, (
        "files of the recipe's user"
    )


def test_the_message_is_aligned() -> None:
    problems = [Problem("a=1", "is wrong"), Problem("longer.key=2", "as well")]
    assert str(ConfigError(problems)).splitlines() == [
        "configuration has 2 problems:",
        "  a=1           is wrong",
        "  longer.key=2  as well",
    ]


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == format_page(), "run make docs"


RECIPE = (
    "# @package _global_\n# Mine.\ndefaults:\n  - quickstart\n  - override /loss_fn: gentle\n  - _self_\nname: mine\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "exp").mkdir()
    (tmp_path / "loss_fn").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(RECIPE + "grpo:\n  max_num_steps: 7\n")
    (tmp_path / "loss_fn" / "gentle.yaml").write_text("ratio_clip_min: 0.05\n")
    return tmp_path


@pytest.mark.parametrize("form", ["--config-dir={}", "hydra.searchpath=[file://{}]", "hydra.searchpath=[{}]"])
def test_a_recipe_outside_the_package_is_found(folder: Path, form: str) -> None:
    config = compose_config([form.format(folder), "+exp=mine", "grpo.seed=3"])
    assert (config.name, config.grpo.max_num_steps, config.grpo.seed) == ("mine", 7, 3)
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.05, None)
    assert config.policy.parallel.pipeline == 2, "it builds on a recipe of the package"
    assert "mine" not in list_config_groups()["exp"], "the folder counts for its command line only"


def test_what_is_wrong_with_a_folder_is_told(folder: Path, tmp_path: Path) -> None:
    base = ["+exp=quickstart"]
    assert problems_of([*base, "--config-dir=/no/such"]) == {"--config-dir=/no/such": "no such folder"}
    (empty := tmp_path / "empty").mkdir()
    ((_, text),) = problems_of([*base, f"--config-dir={empty}"]).items()
    assert text.startswith("has no recipe and no option: files such as exp/NAME.yaml")
    (folder / "exp" / "quickstart.yaml").write_text(RECIPE)
    ((_, text),) = problems_of([*base, f"hydra.searchpath=[{folder}]"]).items()
    assert text == "has exp/quickstart.yaml, a name that is taken already; rename it"
    (folder / "exp" / "quickstart.yaml").unlink()
    problems = problems_of([f"--config-dir={folder}", "+exp=mime"])
    assert "did you mean mine?" in problems["exp=mime"]


QUICKSTART, PPO = "+exp=quickstart", "+exp=quickstart_ppo"


OF_ROWS = set[str]().union(
    *(list_step_metrics(Config(algorithm=name)) for name in ("dpo", "kto", "chord", "reward_model"))
)
ALL_STEP_METRICS = {*list_possible_metrics(Config()), *OF_ROWS}


def test_the_names_are_those_of_the_documented_page() -> None:
    """In both directions, so that a metric that is added to the page is added here too."""
    assert undocumented(ALL_STEP_METRICS) == set()
    of_steps = METRICS.partition("Validation has")[0]
    for cell in re.findall(r"^\| (`.*?) \|", of_steps, flags=re.MULTILINE):
        for name in re.findall(r"`([\w/]+)`", cell):
            matches = [
                metric
                for metric in ALL_STEP_METRICS
                if metric == name or (name.startswith("_") and metric.endswith(name))
            ]
            assert matches or "NAME" in name, f"{name} is documented, and not in metric_names.py"


def test_a_metric_that_a_switch_brings() -> None:
    penalty = "loss_fn.reference_policy_kl_penalty=0.1"
    assert "kl_penalty" in list_step_metrics(compose_config([QUICKSTART, penalty]))
    assert "value_loss" in list_step_metrics(compose_config([PPO]))
    functions = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[a.mine]"]
    config = compose_config([QUICKSTART, *functions, "checkpointing.metric_name=reward/mine"])
    assert list_optional_metrics(config) <= list_step_metrics(config)


@pytest.mark.parametrize(
    ("override", "needs_engines"),
    [("dpo.val_period=25", True), ("dpo.val_rewards=false", False), ("data.val_path=null", False)],
)
def test_pairs_need_engines_for_a_validation_that_samples(override: str, needs_engines: bool) -> None:
    assert compose_config(["+exp=quickstart_dpo", override]).needs_generation == needs_engines
