"""python -m megatron_grpo.new: the folder that it writes, and the names that it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo import new
from megatron_grpo.preflight.environment_checks import check_user_code
from megatron_grpo.preflight.load import compose_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder `riddles`, seen from the working folder that contains it."""
    monkeypatch.chdir(tmp_path)
    assert new.main(["riddles"]) == 0
    return tmp_path / "riddles"


def run_tool(folder: Path, *command: str) -> str:
    """Run a command; its output, if it succeeds."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_the_folder_is_clean_whatever_the_line_length(folder: Path) -> None:
    for config in (("--isolated",), ("--config", str(ROOT / "pyproject.toml"))):
        run_tool(folder.parent, "ruff", "check", *config, "riddles")
        run_tool(folder.parent, "ruff", "format", *config, "--check", "riddles")
    assert not [path for path in folder.rglob("*.*") if b"NAME" in path.read_bytes()]


@pytest.mark.turns(2)
def test_its_own_tests_pass_from_another_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert "3 passed" in run_tool(elsewhere, "pytest", "-q", "-p", "no:cacheprovider", str(folder))


@pytest.mark.turns(2)
def test_its_recipes_compose(folder: Path) -> None:
    config = compose_config(["--config-dir=riddles", "+exp=riddles"])
    assert config.env.keys() == {"riddles"}
    assert config.env["riddles"].reward_funcs == ["riddles.rewards.exact", "riddles.rewards.digits"]
    assert (config.data.train_path, config.data.task_name) == ("riddles/train.jsonl", "riddles")
    turns = compose_config([f"--config-dir={folder}", "+exp=riddles_turns"])
    assert turns.env["riddles"].type == "riddles.environment:SecondTry"
    assert (turns.env["riddles"].reward_funcs, turns.grpo.max_rollout_turns) == ([], 2)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("kind", "tests"), [("loss", 3), ("advantages", 3), ("algorithm", 2), ("family", 2)])
def test_a_kind_is_written_with_its_test_and_recipe(
    kind: str, tests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its tests that start processes are in tests/integration/test_new_run.py."""
    monkeypatch.setenv("MEGATRON_GRPO_FAMILIES", "[[], []]")
    monkeypatch.chdir(tmp_path)
    name = f"own_{kind}"
    assert new.main([name, f"kind={kind}"]) == 0
    for config in (("--isolated",), ("--config", str(ROOT / "pyproject.toml"))):
        run_tool(tmp_path, "ruff", "check", *config, name)
        run_tool(tmp_path, "ruff", "format", *config, "--check", name)
    alone = ("-k", "not trains and not computes")
    assert f"{tests} passed" in run_tool(tmp_path / name, "pytest", "-q", "-p", "no:cacheprovider", *alone, ".")
    assert not [path for path in (tmp_path / name).rglob("*.*") if b"NAME" in path.read_bytes()]
    check_user_code(compose_config([f"--config-dir={name}", f"+exp={name}"]))


def test_a_kind_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert new.main(["riddles", "kind=lose"]) == 2
    assert "kind=lose  must be one of environment, loss, advantages, algorithm, family" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("riddles", "already exists"),
        ("a/b", "small letters, digits and _"),
        ("../up", "small letters"),
        ("Riddles", "small letters"),
        ("my-task", "small letters"),
        ("class", "small letters"),
        ("json", "is a Python module that is installed"),
        ("quickstart", "is a recipe or an environment of the package"),
        ("addition", "is a recipe or an environment of the package"),
    ],
)
def test_a_name_that_cannot_be_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    before = sorted(folder.parent.rglob("*"))
    assert new.main([name]) == 2
    message = capsys.readouterr().err
    assert f"  NAME={name}  " in message
    assert reason in message
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize("words", [[], ["a", "b"]])
def test_one_name_is_needed(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert new.main(words) == 2
    assert "give one name" in capsys.readouterr().err
