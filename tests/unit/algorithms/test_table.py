"""The table of algorithms: every row trains, nothing else knows their names, and a user's own is one of them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

import megatron_grpo
from megatron_grpo.algorithms.context import TrainingRun
from megatron_grpo.config import algorithms
from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.keys import find_key, list_members
from megatron_grpo.config.metric_names import list_optional_metrics, list_step_metrics
from megatron_grpo.config.started_values import list_started_values
from megatron_grpo.losses.loss import make_loss
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.directory import override_values
from tests.support.fake_rollouts import FakeRay
from tests.support.faked_training import RUNS, STEPS, train_on_fakes

PACKAGE = Path(megatron_grpo.__file__).parent
NAMES = set(ALGORITHMS) - {"grpo"}  # which is the name of an estimator of advantages, too


@pytest.mark.parametrize("run", RUNS)
def test_every_algorithm_trains_with_the_step_run_and_loss_of_its_row(
    run: str, tmp_path: Path, fake_ray: FakeRay
) -> None:
    config = compose_typed(RUNS[run]).config
    assert config is not None
    trained = train_on_fakes(config, tmp_path)
    assert trained.state["total_steps"] == STEPS
    assert type(trained) is resolve_name(config.method.run)
    assert type(trained.loss_fn) is resolve_name(config.method.loss)
    assert bool(trained.policy.lessons) == (config.steps_without_policy < STEPS)
    assert (trained.value is not None) == config.method.has_value_model
    assert bool(trained.teachers) == ("teachers" in config.method.models)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_names_in_a_row_exist(name: str) -> None:
    method = ALGORITHMS[name]
    assert issubclass(resolve_name(method.run), TrainingRun)
    assert callable(resolve_name(method.train))
    for key in method.reads:
        assert list_members(key.rstrip(".")) or find_key(key) or key == "teachers.", key
    config = compose_typed([f"algorithm={name}"]).config
    assert config is not None
    assert make_loss(config).field_names
    validated = {"val_loss", "val_reward", "val_accuracy"}
    assert {*method.leading_metrics} <= list_step_metrics(config) | list_optional_metrics(config) | validated


def list_name_tests(tree: ast.AST) -> Iterator[int]:
    """Lines that compare the name of an algorithm, or choose by it."""
    for node in ast.walk(tree):
        constants: set[object] = set()
        match node:
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                continue
            case ast.Compare():
                operands = [node.left, *node.comparators]
                constants = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
            case ast.Subscript(slice=key):
                operands = [key]
            case ast.Call(func=ast.Attribute(value=value, attr="get" | "startswith"), args=arguments):
                operands = [value, *arguments]
            case ast.Match(subject=subject):
                operands = [subject]
            case _:
                continue
        attributes = {part.attr for part in operands if isinstance(part, ast.Attribute)}
        if attributes & {"algorithm", "loop_name"} or constants & NAMES:
            yield node.lineno


def test_no_code_outside_the_table_tests_the_name_of_an_algorithm() -> None:
    lines = []
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if path not in ("config/algorithms.py",):
            lines += [f"{path}:{line}" for line in list_name_tests(ast.parse(file.read_text()))]
    assert lines == []
    for table in PACKAGE.rglob("*.yaml"):
        for line in table.read_text().splitlines():
            condition = r"(\? >-)?(.* and )?algorithm!?=[\w|]+( and .*)?:"
            assert re.match(condition, line.strip()) is None, f"{table.name}: {line}"


@pytest.mark.parametrize(
    "text",
    [
        'config.algorithm == "ppo"',
        'config.algorithm in ("dpo", "sft")',
        '{"dpo": 1}.get(config.algorithm)',
        "TABLE[config.algorithm]",
        'config.loop_name == "grpo"',
        'values.get("algorithm") == "reward_model"',
        'config.algorithm.startswith("d")',
    ],
)
def test_the_search_for_tests_of_names_finds_them(text: str) -> None:
    assert list(list_name_tests(ast.parse(text)))


PAGE = (PACKAGE.parent / "docs" / "extending.md").read_text()
RECIPE = PAGE[PAGE.index('"""my_recipe.py:') :].partition("```")[0]
"""The file of docs/extending.md."""
WRONG = """
WRONG, ELSEWHERE = 3, replace(ALGORITHM, section="mine")
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with a recipe, from which the run starts."""
    (tmp_path / "my_recipe.py").write_text(RECIPE + WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(algorithms, "_IMPORTED", {})
    yield tmp_path
    sys.modules.pop("my_recipe", None)


SFT = ["+exp=quickstart_sft"]


@pytest.mark.parametrize("name", ["my_recipe:ALGORITHM", "my_recipe.ALGORITHM"])
def test_an_algorithm_of_the_users_own_folder_trains(name: str, own_folder: Path, fake_ray: FakeRay) -> None:
    config = compose_config([*SFT, f"algorithm={name}", "sft.val_rewards=false", "sft.val_batch_size=3"])
    assert (config.algorithm, config.method.name, config.method.rows) == (name, "long_rows", "supervised")
    assert config.loop.val_batch_size == 3
    assert {started.key for started in list_started_values(config)} == {"algorithm"}
    run = train_on_fakes(config, own_folder)
    assert run.state["total_steps"] == STEPS
    assert [row["long_rows"] for row in run.logged] == [0.0] * STEPS
    assert "long_rows" in list_step_metrics(config)


def test_a_recorded_algorithm_is_imported_only_from_a_run_that_is_trusted(own_folder: Path) -> None:
    config = compose_config([*SFT, "algorithm=my_recipe:ALGORITHM"])
    recorded = {"algorithm": config.algorithm, "policy": {"model": {"path": "m"}}, "data": {"train_path": "d"}}
    sys.modules.pop("my_recipe")
    algorithms._IMPORTED.clear()
    with pytest.raises(
        ConfigError, match=r"algorithm=my_recipe:ALGORITHM +is recorded in config\.yaml and imports code"
    ):
        override_values(dict(recorded), [], "config.yaml")
    assert "my_recipe" not in sys.modules
    loaded = override_values(dict(recorded), ["sft.val_batch_size=3"], "config.yaml", is_trusted=True)
    assert loaded.loop.val_batch_size == 3
    with pytest.raises(ConfigError, match="did you mean sft"):
        override_values(dict(recorded), ["sft.val_batch_sizes=3"], "config.yaml", is_trusted=True)


def test_a_trusted_run_has_its_algorithm_in_its_own_code(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, working_folder = own_folder / "run", own_folder / "elsewhere"
    (run / "code").mkdir(parents=True)
    (own_folder / "my_recipe.py").rename(run / "code" / "my_recipe.py")
    working_folder.mkdir()
    monkeypatch.chdir(working_folder)
    recorded = {"algorithm": "my_recipe:ALGORITHM", "policy": {"model": {"path": "m"}}, "data": {"train_path": "d"}}
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        override_values(dict(recorded), [], "config.yaml", is_trusted=True)
    loaded = override_values(dict(recorded), [f"run_dir={run}"], "config.yaml", run, is_trusted=True)
    assert loaded.method.name == "long_rows"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my_recipe:WRONG", "is not a megatron_grpo.config.algorithms.Algorithm"),
        ("my_recipe:ELSEWHERE", "has section=mine; a loop is one of dpo, grpo, kto, ppo, reward_model, sft"),
        ("my_recipe:NOTHING", "cannot be imported: AttributeError"),
        ("your_recipe:ALGORITHM", "cannot be imported: ModuleNotFoundError"),
        ("my recipe", "no such option"),
    ],
)
def test_what_is_no_algorithm_is_refused(name: str, text: str, own_folder: Path) -> None:
    problems = {problem.key: problem.text for problem in compose_typed([*SFT, f"algorithm={name}"]).problems}
    assert text in problems["algorithm"]


def test_own_keys_of_other_algorithms_are_refused_for_a_users_algorithm(own_folder: Path) -> None:
    problems = compose_typed([*SFT, "algorithm=my_recipe:ALGORITHM", "ppo.ppo_epochs=2"]).problems
    assert [problem.text for problem in problems] == ["is for algorithm=ppo, and this run has algorithm=long_rows"]
    (problem,) = compose_typed([*SFT, "algorithm=my_recipe:ALGORITHM", "sft.val_batch_sizes=2"]).problems
    assert problem.text == "unknown key; did you mean sft.val_batch_size?"
