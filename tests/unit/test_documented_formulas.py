"""The functions and classes of docs/extending.md, as they stand there: they pass their trials."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_grpo.config.schema import GRPOConfig, LoggerConfig, LossConfig, OptimizerConfig
from megatron_grpo.losses import decay
from megatron_grpo.losses.advantages import INPUTS as REWARD_INPUTS
from megatron_grpo.losses.advantages import USER_INPUTS, make_estimator
from megatron_grpo.losses.formula_trials import find_advantages_problem, find_objective_problem
from megatron_grpo.losses.objectives import INPUTS
from megatron_grpo.losses.policy_loss import make_objective
from megatron_grpo.observability import user_tracker

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def read_section(title: str) -> str:
    return re.split(r"\n## ", PAGE.partition(f"\n## {title}\n")[2])[0]


def list_parameters(section: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))


def test_the_functions_pass_their_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = [read_section("A loss of your own"), read_section("Advantages of your own")]
    code = [block for section in sections for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)]
    assert len(code) == 2
    (tmp_path / "documented_losses.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(tmp_path)
    folders = (str(tmp_path),)
    objective = LossConfig(objective="documented_losses.two_bounds", objective_options={"high": 0.3})
    assert find_objective_problem(make_objective(objective, folders)) is None
    config = GRPOConfig()
    config.adv_estimator.name = "documented_losses.over_mean"
    assert find_advantages_problem(make_estimator(config, folders), 4) is None


def test_the_tables_have_all_inputs() -> None:
    assert list_parameters(read_section("A loss of your own")) == INPUTS.keys()
    assert list_parameters(read_section("Advantages of your own")) == {*USER_INPUTS} <= REWARD_INPUTS.keys()
    assert list_parameters(read_section("A schedule of your own")) == decay.INPUTS.keys()
    assert list_parameters(read_section("A tracker of your own")) == user_tracker.INPUTS.keys()


def test_the_schedule_and_the_tracker_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = [read_section("A schedule of your own"), read_section("A tracker of your own")]
    code = [block for section in sections for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)]
    assert len(code) == 2
    (tmp_path / "documented_parts.py").write_text("\n\n".join(code))
    monkeypatch.syspath_prepend(tmp_path)
    folders = (str(tmp_path),)
    optimizer = OptimizerConfig(decay_style="documented_parts.trapezoid", decay_options={"flat": 0.8})
    schedule = decay.make_decay("policy", optimizer, folders)
    assert schedule is not None
    assert decay.find_decay_problem(schedule, 50, 5) is None
    heights = [decay.compute_height(schedule, step, 50, 0) for step in (10, 40, 45, 50)]
    assert heights == pytest.approx([1.0, 1.0, 0.5, 0.0])
    logger = LoggerConfig(tracker="documented_parts.Csv", tracker_options={"file": "all.csv"})
    maker = user_tracker.make_tracker(logger, folders)
    assert maker is not None
    tracker = user_tracker.open_tracker(maker, run_dir=tmp_path, settings={}, resume_step=None)
    tracker.log(3, {"train/reward": 0.5, "train/loss": 1.0})
    tracker.log_table(3, "completions", [{"prompt": "1+1="}])
    tracker.close(failed=False)
    assert (tmp_path / "all.csv").read_text().split() == ["3,train/reward,0.5", "3,train/loss,1.0"]
