"""Schedules and trackers of the user's own folder: what is refused before Ray starts, and what a run gets of them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.config.started_values import find_untrusted_values
from megatron_grpo.losses.decay import make_decay
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.preflight.environment_checks import check_user_code
from megatron_grpo.preflight.load import compose_checked, compose_config
from megatron_grpo.preflight.unused_settings import find_unused_settings
from megatron_grpo.run.user_code import keep_user_code
from megatron_grpo.trainer.optimizer import Schedule
from tests.integration.runs import read_jsonl

CODE = """
import csv, itertools, math, random
import torch

def trapezoid(progress, *, flat: float = 0.5):
    return 1.0 if progress <= flat else (1 - progress) / (1 - flat)

def cosine(step, steps):
    return torch.tensor(0.5 * (1 + math.cos(math.pi * step / steps)))

def rises(progress):
    return 1 + progress

def falls(step, steps):
    return (steps - 2 * step) / steps

def is_missing(progress):
    return math.nan if progress > 0.9 else 1.0

def is_text(progress):
    return "high"

def returns_nothing(progress):
    pass

def is_vector(progress):
    return torch.ones(2)

def raises(step):
    return [1.0, 0.5][step]

def jumps(progress):
    return random.random()

_count = itertools.count()

def counts(progress):
    return 1 / (1 + next(_count))


class Csv:
    def __init__(self, run_dir, settings, *, file: str = "figures.csv", every: int = 1):
        self.path, self.every, self.steps = run_dir / file, every, settings["grpo"]["max_num_steps"]
        self.path.write_text("")

    def log(self, step, values):
        if step % self.every == 0:
            with self.path.open("a") as file:
                csv.writer(file).writerows([step, self.steps, *item] for item in values.items())

    def log_table(self, step, name, rows):
        pass

    def close(self, failed):
        with self.path.open("a") as file:
            file.write(f"failed={failed}")


class Nameless:
    def log(self, step, values):
        pass

    def close(self, failed):
        pass


class Narrow(Csv):
    def log(self, values):
        pass


class Broken(Csv):
    def log(self, step, values):
        raise ConnectionError("server is away")


def make(run_dir, resume_step):
    return object()


def fail(run_dir):
    raise OSError("no server")
"""
SETTINGS = ("+exp=quickstart", "grpo.max_num_steps=20", "policy.optimizer.warmup_steps=0", "run_dir=run")
DECAY, TRACKER = "policy.optimizer.decay_style=", "logger.tracker="


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder; each test has another, since modules are imported once."""
    monkeypatch.chdir(tmp_path)
    name = f"parts_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


def find_problems(*overrides: str) -> list[str]:
    try:
        assert list(check_user_code(compose_config([*SETTINGS, *overrides]))) == []
    except ConfigError as error:
        return [f"{problem.subject}  {problem.text}" for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rises", "returned 1.05 at progress=0.05, step=1, steps=20, and not a number from 0"),
        ("falls", "returned -0.1 at progress=0.55, step=11, steps=20"),
        ("is_missing", "returned nan at progress=0.95"),
        ("is_text", "returned high at progress=0"),
        ("returns_nothing", "returned None at progress=0"),
        ("is_vector", "returned tensor([1., 1.]) at progress=0"),
        ("raises", "raised IndexError: list index out of range"),
        ("jumps", "returned two values for step=0; each rank, and a resume, has to get the same one"),
        ("counts", "returned two values for step=0"),
        ("absent", "cannot be imported: AttributeError"),
        ("Csv", "run_dir is required by Csv"),
    ],
)
def test_a_wrong_schedule_is_named_for_every_loop(module: str, name: str, text: str) -> None:
    (problem,) = find_problems(f"{DECAY}{module}.{name}")
    assert problem.startswith(f"{DECAY}{module}.{name}  ")
    assert text in problem
    with pytest.raises(ConfigError, match=f"{module}.{name}  ") as caught:
        check_user_code(compose_config(["+exp=quickstart_sft", f"{DECAY}{module}.{name}"]))
    (problem,) = caught.value.problems
    assert problem.key == DECAY.rstrip("=")


def test_options_of_a_schedule_are_checked(module: str) -> None:
    assert find_problems(f"{DECAY}{module}.trapezoid", "policy.optimizer.decay_options.flat=0.25") == []
    assert find_problems(f"{DECAY}{module}.cosine", "policy.optimizer.warmup_steps=30") == []
    (problem,) = find_problems(f"{DECAY}{module}.trapezoid", "policy.optimizer.decay_options.flt=0.25")
    assert "flt=0.25 is not an option of trapezoid; did you mean flat?" in problem
    (problem,) = find_problems("policy.optimizer.decay_options.flat=0.25")
    assert problem.startswith("policy.optimizer.decay_options.flat=0.25  is for a function of your own, and policy")
    (problem,) = compose_checked([*SETTINGS, f"{DECAY}trapezoid"]).problems
    assert problem.text.startswith("must be one of constant, linear, cosine, ")
    assert problem.text.endswith(", or module.function")


@pytest.mark.parametrize("warmup", [0, 4])
def test_learning_rates_are_those_of_the_function(module: str, warmup: int, tmp_path: Path) -> None:
    low, high, steps = 1e-3, 1e-2, 20
    settings = OptimizerConfig(
        lr=high, min_lr=low, warmup_steps=warmup, decay_style=f"{module}.trapezoid", decay_options={"flat": "0.25"}
    )
    groups: list[dict[str, Any]] = [{}, {"max_lr": 2 * high, "min_lr": 0.0}]  # the second has rates of its own
    decay = make_decay("policy", settings, (str(tmp_path),))
    schedule = Schedule(SimpleNamespace(param_groups=groups), settings, steps, decay)
    for step in range(1, steps + 4):
        schedule.step(1)
        progress = min((step - warmup) / (steps - warmup), 1.0)
        height = 1.0 if progress <= 0.25 else (1 - progress) / 0.75
        expected = high * step / warmup if step <= warmup else low + height * (high - low)
        assert math.isclose(groups[0]["lr"], expected, rel_tol=1e-12), step
        if step > warmup:
            assert math.isclose(groups[1]["lr"], 2 * high * height, rel_tol=1e-12, abs_tol=1e-18), step


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Nameless", "has no method log_table(step, name, rows)"),
        ("Narrow", "is called as log(step, values), and its method does not fit: too many positional arguments"),
        ("absent", "cannot be imported: AttributeError"),
        ("CODE", "cannot be imported: AttributeError"),
    ],
)
def test_a_wrong_tracker_is_named_before_a_run(module: str, name: str, text: str) -> None:
    (problem,) = find_problems(f"{TRACKER}{module}.{name}")
    assert problem.startswith(f"{TRACKER}{module}.{name}  ")
    assert text in problem


def test_options_of_a_tracker_are_checked(module: str) -> None:
    assert find_problems(f"{TRACKER}{module}.Csv", "logger.tracker_options.every=2") == []
    (problem,) = find_problems(f"{TRACKER}{module}.Csv", "logger.tracker_options.every=often")
    assert f"{TRACKER}{module}.Csv  every=often does not fit Csv" in problem
    (remark,) = find_unused_settings(compose_config([*SETTINGS, "logger.tracker_options.every=2"]))
    assert (remark.subject, remark.text) == ("logger.tracker_options.every=2", "needs logger.tracker")


def test_a_tracker_gets_the_figures_and_the_end_of_a_run(module: str, tmp_path: Path) -> None:
    options = ["logger.tracker_options.every=2", "logger.progress=false", "logger.tensorboard=false"]
    config = compose_config([*SETTINGS, f"{TRACKER}{module}.Csv", *options])
    logger = RunLogger(tmp_path / "run", config)
    for step in (1, 2):
        logger.log_step(step, {"reward": step / 4}, {"total": 1.0}, {})
    logger.close(failed=True)
    lines = (tmp_path / "run" / "figures.csv").read_text().split()
    assert lines[0] == "2,20,train/reward,0.5"
    assert lines[-1] == "failed=True"


@pytest.mark.parametrize(
    ("name", "text"), [("make", "has no method log(step, values)"), ("fail", "raised OSError: no server")]
)
def test_a_function_that_makes_no_tracker_is_named_at_the_start(
    module: str, name: str, text: str, tmp_path: Path
) -> None:
    assert find_problems(f"{TRACKER}{module}.{name}") == []
    config = compose_config([*SETTINGS, f"{TRACKER}{module}.{name}", "logger.tensorboard=false"])
    with pytest.raises(RunError, match=f"{TRACKER}{module}.{name} ") as caught:
        RunLogger(tmp_path / "run", config)
    assert text in str(caught.value)


def test_a_tracker_that_fails_is_named_and_left_out(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"{TRACKER}{module}.Broken", "logger.tensorboard=false", "logger.progress=false"]
    logger = RunLogger(tmp_path / "run", compose_config([*SETTINGS, *settings]))
    for step in (1, 2):
        logger.log_step(step, {"reward": 0.5}, {"total": 1.0}, {})
    logger.close()
    text = f"{TRACKER}{module}.Broken gets no more figures, and the run goes on: ConnectionError: server is away"
    assert capsys.readouterr().out.count(text) == 1
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2


def test_recorded_schedules_and_trackers_need_trust_and_are_kept(module: str, tmp_path: Path) -> None:
    config = compose_config([*SETTINGS, f"{DECAY}{module}.trapezoid", f"{TRACKER}{module}.Csv"])
    problems = find_untrusted_values(config, "config.yaml", [], ["policy.", "logger."])
    assert {problem.key for problem in problems} == {"policy.optimizer.decay_style", "logger.tracker"}
    check_user_code(config)
    keep_user_code(tmp_path / "run", config)
    assert [file.name for file in (tmp_path / "run" / "code").iterdir()] == [f"{module}.py"]
