"""Objectives and advantages of the user's own folder are tried before Ray starts, and kept in the run's folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.started_values import find_untrusted_values, list_code_folders
from megatron_grpo.preflight.environment_checks import check_user_code
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.user_code import keep_user_code, list_code_changes

CODE = """
from {helper} import scale

def signed(log_ratio, advantages, *, power: int = 1):
    return -scale(log_ratio.exp()) ** power * advantages

def averaged(log_ratio, advantages):
    return -(log_ratio.exp() * advantages).mean()

def centred(rewards, *, factor: float = 1.0):
    return factor * (rewards - rewards.nanmean(dim=1, keepdim=True))

def flat(rewards):
    return rewards.flatten()

def to_engine(logprobs, sampling_logprobs, advantages):
    return -(logprobs - sampling_logprobs).exp() * advantages

def masks_by_engine(log_ratio, logprobs, sampling_logprobs, advantages):
    is_near = (logprobs - sampling_logprobs).detach().abs() < 0.5
    return -log_ratio.exp() * advantages * is_near

def weighs_by_engine(log_ratio, old_logprobs, sampling_logprobs, advantages):
    return -(old_logprobs - sampling_logprobs).exp().clamp(max=2.0) * log_ratio.exp() * advantages
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder; each test has another, since modules are imported once."""
    monkeypatch.chdir(tmp_path)
    name = f"losses_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE.format(helper=f"help_of_{name}"))
    (tmp_path / f"help_of_{name}.py").write_text("def scale(ratio):\n    return ratio\n")
    return name


def find_remarks(*overrides: str) -> list[str]:
    return [str(remark.subject) for remark in check_user_code(compose_config(["+exp=quickstart", *overrides]))]


def find_problems(*overrides: str) -> list[str]:
    try:
        find_remarks(*overrides)
    except ConfigError as error:
        return [f"{problem.subject}  {problem.text}" for problem in error.problems]
    return []


def test_functions_that_pass_their_trials(module: str) -> None:
    objective, advantages = f"loss_fn.objective={module}.signed", f"grpo.adv_estimator.name={module}.centred"
    assert find_problems(objective, advantages) == []
    assert find_problems(objective, "loss_fn.objective_options.power=2") == []
    assert find_problems(advantages, "grpo.adv_estimator.options.factor=2", "grpo.num_generations_per_prompt=1") == []


def test_mistakes_are_named_with_their_key(module: str) -> None:
    (averaged,) = find_problems(f"loss_fn.objective={module}.averaged")
    assert averaged.startswith(f"loss_fn.objective={module}.averaged  returned a loss of shape []")
    (flat,) = find_problems(f"grpo.adv_estimator.name={module}.flat")
    assert flat.startswith(f"grpo.adv_estimator.name={module}.flat  returned shape [")
    (option,) = find_problems(f"loss_fn.objective={module}.signed", "loss_fn.objective_options.pwer=2")
    assert option == f"loss_fn.objective={module}.signed  pwer=2 is not an option of signed; did you mean power?"
    (missing,) = find_problems("loss_fn.objective=no_losses_here.dppo")
    assert "function no_losses_here.dppo cannot be imported: ModuleNotFoundError" in missing


def test_keys_that_the_function_does_not_take_are_refused(module: str) -> None:
    (unread,) = find_problems(f"loss_fn.objective={module}.signed", "loss_fn.ratio_clip_max=0.3")
    assert unread.startswith(f"loss_fn.ratio_clip_max=0.3  is no parameter of {module}.signed, so nothing reads it")
    (unread,) = find_problems(f"grpo.adv_estimator.name={module}.centred", "grpo.normalize_rewards=false")
    assert unread.startswith("grpo.normalize_rewards=False  is no parameter of")


def test_a_ratio_to_the_engine_beside_the_correction_is_remarked_on(module: str) -> None:
    correction = "loss_fn.use_importance_sampling_correction=true"
    for name, is_double in (
        ("to_engine", True),
        ("weighs_by_engine", True),
        ("masks_by_engine", False),
        ("signed", False),
    ):
        objective = f"loss_fn.objective={module}.{name}"
        assert find_remarks(objective, correction) == ([correction] if is_double else [])
        assert find_remarks(objective) == []
    assert find_remarks(correction) == []


def test_a_recorded_function_needs_trust(module: str) -> None:
    config = compose_config(
        ["+exp=quickstart", f"loss_fn.objective={module}.signed", f"grpo.adv_estimator.name={module}.centred"]
    )
    problems = find_untrusted_values(config, "config.yaml", [], ["loss_fn.", "grpo."])
    assert {problem.key for problem in problems} == {"loss_fn.objective", "grpo.adv_estimator.name"}
    assert find_untrusted_values(compose_config(["+exp=quickstart"]), "config.yaml", [], ["loss_fn.", "grpo."]) == []


def test_a_run_keeps_the_code_and_tells_of_changes(module: str, tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart", f"loss_fn.objective={module}.signed"])
    check_user_code(config)
    run = tmp_path / "run"
    keep_user_code(run, config)
    files = [f"{module}.py", f"help_of_{module}.py"]
    assert sorted(path.name for path in (run / "code").iterdir()) == sorted(files)
    assert list_code_changes(run, config) == []
    (tmp_path / files[1]).write_text("def scale(ratio):\n    return 2 * ratio\n")
    (change,) = list_code_changes(run, config)
    assert change.startswith(f"{tmp_path / files[1]}: is not as it was at the last start")


@pytest.mark.parametrize("absent", ["pynvml_of_another", "pynvml_of_another.driver"])
def test_the_code_of_a_run_is_importable_where_its_values_need_it_alone(
    module: str, absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library imports optional packages by name; a run that somebody else made may hold files of these names."""
    code = tmp_path / "run" / "code"
    path = code / (absent.replace(".", "/") + ".py")
    path.parent.mkdir(parents=True)
    path.write_text("raise AssertionError('code of another was imported')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = compose_config(["+exp=quickstart", f"run_dir={tmp_path / 'run'}"])
    check_user_code(config)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(absent)
    objective = f"loss_fn.objective={module}.signed"
    config = compose_config(["+exp=quickstart", objective, f"run_dir={tmp_path / 'run'}"])
    assert str(code) not in list_code_folders(config)
    check_user_code(config)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(absent)
    keep_user_code(tmp_path / "run", config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path)])
    assert list_code_folders(config)[-1] == str(code)
