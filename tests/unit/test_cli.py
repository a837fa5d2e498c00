"""The train command: help, the resolved configuration, exit codes and what is printed where."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import yaml

from megatron_grpo import train
from megatron_grpo.composition.overrides import config_groups
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config


def put_loop_in_place(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> list[Config]:
    """Replaces the training loop by one that only records its configuration, or fails."""
    started: list[Config] = []

    def run(config: Config) -> None:
        started.append(config)
        if error is not None:
            raise error

    loop = ModuleType("megatron_grpo.algorithms.grpo")
    loop.run = run  # type: ignore[attr-defined]  # a module made by hand
    monkeypatch.setitem(sys.modules, "megatron_grpo.algorithms.grpo", loop)
    return started


def test_help_names_every_recipe_and_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    for group, options in config_groups().items():
        assert group in text
        assert all(option in text for option in options)
    assert "policy.parallel.tensor (1)" in text
    assert "data.train_path (required)" in text


@pytest.mark.parametrize("option", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_prints_the_resolved_configuration(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["+exp=qwen3_8b_8gpu", "grpo.max_num_steps=3", *option]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["grpo"]["max_num_steps"] == 3
    assert shown["grpo"]["use_leave_one_out_baseline"] is True
    assert shown["policy"]["model"]["path"] == "Qwen/Qwen3-8B"
    assert "${" not in str(shown)


def test_cfg_needs_no_file_and_no_value_for_required_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["train_path"] == "???"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["+exp=quickstart", "grpo.max_num_step=3"], "did you mean grpo.max_num_steps?"),
        (["--cfg", "job", "nope=3"], "unknown key"),
        (["--cfg", "hydra"], "--cfg job"),
        (["--multirun"], "no such option"),
        ([], "policy.model.path  is required"),
    ],
)
def test_a_mistake_exits_with_2_before_anything_starts(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = put_loop_in_place(monkeypatch)
    assert train.main(arguments) == 2
    captured = capsys.readouterr()
    assert started == []
    assert captured.out == ""
    assert text in captured.err
    assert "Traceback" not in captured.err


def test_the_quickstart_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    started = put_loop_in_place(monkeypatch)
    assert train.main(["+exp=quickstart", "grpo.max_num_steps=3", "policy.parallel.tensor=2"]) == 0
    (config,) = started
    assert config.grpo.max_num_steps == 3
    assert (config.policy.parallel.tensor, config.policy.parallel.pipeline) == (2, 2)
    assert config.generation.parallel.pipeline == 2


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RunError("engine 0 died"), 1, "run failed: engine 0 died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_failed_run_prints_one_line(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_loop_in_place(monkeypatch, error)
    assert train.main(["+exp=quickstart"]) == code
    assert capsys.readouterr().err == text
