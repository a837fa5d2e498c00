"""The environment that docs/environments.md shows works as it says, under the launchers' way of starting Python too."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo import command
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.registry import create_environment

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "environments.md").read_text().partition("## Environments of other libraries")[0]


def read_block(language: str) -> str:
    """The block of the page in this language."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(block)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the module of the page."""
    (tmp_path / "guessing.py").write_text(read_block("python"))
    return tmp_path


def request(state: Any) -> EnvironmentRequest:
    return EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info={}, state=state)


def test_the_page_shows_it_in_forty_lines() -> None:
    assert len(read_block("python").splitlines()) <= 40


def test_it_plays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    section = yaml.safe_load(read_block("yaml"))["env"]["guessing"]
    environment = create_environment(EnvironmentConfig(**section), EnvironmentSettings(import_folders=(str(folder),)))
    assert environment.multi_turn
    state = environment.reset("", {"number": "7"})
    for response, text in (("3", "larger"), ("9", "smaller")):
        turn = environment.step(state, response)
        assert (turn.done, turn.text) == (False, text)
        state = turn.state
    lost_turn, won = environment.step(state, "seven"), environment.step(state, "6")
    assert lost_turn.done
    assert won.done
    scores = environment.score([request(lost_turn.state), request(won.state)])
    assert [(score.reward, score.correct) for score in scores] == [(0.0, False), (1.0, True)]


OVERRIDES = (
    "+exp=quickstart",
    "~env.addition",
    "+env.addition.type=guessing:GuessingEnvironment",
    "grpo.max_rollout_turns=8",
)


def test_the_local_launcher_finds_it_in_the_working_folder(folder: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(folder / "run"), "PYTHONPATH": str(ROOT)}
    option = "+env.addition.options.close_enough=1"
    arguments = [str(ROOT / "launchers" / "local.sh"), *OVERRIDES, option, "--check"]
    process = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    assert "configuration is fine" in process.stdout, process.stdout
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            ("+env.addition.options.close_enogh=1",),
            "env.addition.options.close_enogh=1  is not an option of GuessingEnvironment; did you mean close_enough?",
        ),
        (
            ("+env.addition.options.close_enough=far",),
            "does not fit GuessingEnvironment: Input should be a valid integer",
        ),
        (("grpo.max_rollout_turns=1",), "takes several turns; give how many the model may have at most"),
        (("env.addition.type=guessing:Missing",), "cannot be imported: AttributeError"),
        (("env.addition.type=guessing:Turn",), "is not a subclass of megatron_grpo.environments.interface.Environment"),
        (("env.addition.type=chess",), "must be one of math, addition, code,"),
    ],
    ids=["unknown option", "wrong value", "one turn", "no class", "no environment", "no type"],
)
def test_mistakes_about_it_are_told_before_the_start(
    folder: Path,
    settings: tuple[str, ...],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "guessing", raising=False)
    assert command.main([*OVERRIDES, *settings, f"run_dir={folder / 'run'}", "--check"]) == 2
    assert text in capsys.readouterr().err


def test_modules_on_the_python_path_are_found_and_installed_ones_come_first(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "numpy.py").write_text("raise RuntimeError('a file of the working folder hides a package')")
    path = os.pathsep.join([str(ROOT), str(folder)])
    environment = {**os.environ, "PYTHONPATH": path}
    arguments = [sys.executable, "-P", "-m", "megatron_grpo.train", *OVERRIDES, f"run_dir={tmp_path}/run", "--check"]
    process = subprocess.run(arguments, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
