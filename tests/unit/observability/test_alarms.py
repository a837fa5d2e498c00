"""Alarms: each is raised by a made series that has its sign, and by none that has not."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.observability.alarms import RULES, WINDOW, AlarmWatch, read_alarms
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.trainer.model_ranks import TrainResult

STEPS = 300
SAMPLES = 256
RECORDED = sorted((Path(__file__).parent / "recorded_metrics").glob("*.json"))
"""Figures of whole runs that went well, as columns."""
Series = Callable[[float], float]  # value at a share of the run, 0 to 1


def make_rows(noise: float = 0.03, **series: Series | None) -> list[dict[str, Any]]:
    """Steps of a run that learns well, with some figures replaced; None leaves one out."""
    healthy: dict[str, Series | None] = {
        "reward": lambda t: 0.3 + 0.5 * t,
        "approx_entropy": lambda t: 0.6 - 0.4 * t,
        "kl_penalty": lambda t: 0.08 * t,
        "gen_kl_error": lambda t: 1e-4,
        "token_mult_prob_error_off": lambda t: 0.0,
        "grad_norm": lambda t: 0.5,
        "groups_without_signal": lambda t: 0.3 + 0.3 * t,
        "groups_all_right": lambda t: 0.1 + 0.5 * t,
        "truncation_rate": lambda t: 0.1 - 0.05 * t,
        "failed_rollouts": lambda t: 0.0,
        "optimizer_steps": lambda t: 1.0,
        "slowest_rank_speed": lambda t: 0.95,
    }
    draw = np.random.default_rng(0).normal
    rows = []
    for step in range(1, STEPS + 1):
        values = {name: form(step / STEPS) for name, form in (healthy | series).items() if form is not None}
        figures = {name: value * math.exp(noise * draw()) for name, value in values.items()}
        rows.append({"step": step, "slowest_rank": 3.0, **figures})
    return rows


def raise_alarms(rows: list[dict[str, Any]], validations: dict[int, float] | None = None) -> list[tuple[int, str]]:
    """Step and name of every alarm of a run; `validations`: held-out accuracy by step."""
    watch, raised = AlarmWatch(SAMPLES), []
    for row in rows:
        if row["step"] in (validations or {}):
            watch.observe_validation({"step": row["step"], "val_accuracy": (validations or {})[row["step"]]})
        raised += [(alarm.step, alarm.name) for alarm in watch.observe_step(row)]
    return raised


BROKEN: dict[str, dict[str, Series]] = {
    "entropy_collapse": {"approx_entropy": lambda t: 0.6 * math.exp(-9 * t)},
    "kl_growth": {"kl_penalty": lambda t: 0.02 + 0.001 * math.exp(9 * t)},
    "mismatch_growth": {"gen_kl_error": lambda t: 1e-4 * math.exp(7 * t)},
    "reward_flat": {"reward": lambda t: 0.3},
    "reward_saturated": {"groups_all_right": lambda t: min(0.99, 0.2 + t)},
    "groups_without_signal": {"groups_without_signal": lambda t: min(0.95, 0.2 + t)},
    "lengths_at_limit": {"truncation_rate": lambda t: 0.1 + 0.5 * t},
    "gradient_spike": {"grad_norm": lambda t: 30.0 if 0.6 < t < 0.604 else 0.5},
    "failed_rollouts": {"failed_rollouts": lambda t: 20.0 if t > 0.5 else 0.0},
    "slow_rank": {"slowest_rank_speed": lambda t: 0.95 if t < 0.5 else 0.6},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_series_raises_its_alarm_once_and_no_other(name: str) -> None:
    raised = raise_alarms(make_rows(**BROKEN[name]))
    assert [alarm for _, alarm in raised] == [name]
    assert raised[0][0] > WINDOW


def test_held_out_accuracy_that_falls_while_reward_rises() -> None:
    healthy = {step: 0.4 + 0.001 * step for step in range(25, 301, 25)}
    over_fitted = healthy | dict.fromkeys((225, 250, 275, 300), 0.3)
    assert raise_alarms(make_rows(), healthy) == []
    ((step, name),) = raise_alarms(make_rows(), over_fitted)
    assert (step, name) == (250, "held_out_falls"), "two validations in succession"
    assert raise_alarms(make_rows(reward=lambda t: 0.9 - 0.5 * t, approx_entropy=None), over_fitted) == [
        (200, "reward_flat")
    ], "held-out accuracy that falls with the reward is no over-fitting"


def test_every_rule_has_a_series_that_raises_it() -> None:
    assert {*BROKEN, "held_out_falls"} == set(RULES)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.15])
def test_a_run_that_learns_raises_nothing(noise: float) -> None:
    assert raise_alarms(make_rows(noise)) == []


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_recorded_runs_that_went_well_raise_nothing(file: Path) -> None:
    columns = json.loads(file.read_text())
    validations = dict(columns.pop("validation"))
    rows = [
        {name: column[index] for name, column in columns.items() if column[index] is not None}
        for index in range(len(columns["step"]))
    ]
    assert len(rows) >= 100
    assert raise_alarms(rows, validations) == []


def test_there_are_recorded_runs() -> None:
    assert RECORDED


def test_an_alarm_is_raised_again_once_its_sign_was_away() -> None:
    spikes = (100, 101, 105, 150)
    rows = make_rows()
    for step in spikes:
        rows[step - 1]["grad_norm"] = 50.0
    assert raise_alarms(rows) == [(100, "gradient_spike"), (150, "gradient_spike")]


def test_figures_that_are_missing_or_not_finite_raise_nothing() -> None:
    assert raise_alarms([{"step": step} for step in range(1, STEPS)]) == []
    assert raise_alarms(make_rows(grad_norm=lambda t: math.nan, reward=lambda t: math.inf)) == []


def test_ranks_that_are_slow_in_turn_raise_nothing() -> None:
    rows = make_rows(slowest_rank_speed=lambda t: 0.5)
    assert [name for _, name in raise_alarms(rows)] == ["slow_rank"]
    assert raise_alarms([row | {"slowest_rank": row["step"] // 7 % 4} for row in rows]) == []


def test_a_slow_rank_is_named_from_figures_of_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config()
    config.logger.tensorboard = False
    result = TrainResult(0.0, 1.0, 1e-3, probe_s=(1.0, 1.0, 1.6, 0.9))
    for resume_step, steps in ((None, range(1, 8)), (7, range(8, 12))):  # signs of before a resume count
        logger = RunLogger(tmp_path, config, resume_step=resume_step)
        for step in steps:
            logger.log_step(step, {"loss": 0.1}, {"total": 1.0}, result.summarize_devices())
        logger.close()
    (alarm,) = read_alarms(tmp_path)
    assert (alarm["step"], alarm["name"]) == (10, "slow_rank")
    assert "rank 2 of the policy has computed at 62% of the others' speed" in capsys.readouterr().out


def test_a_run_logs_its_alarms_and_a_resumed_one_does_not_repeat_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.logger.tensorboard, config.logger.alarms_stop = False, ["failed_rollouts"]
    config.grpo.num_prompts_per_step = config.grpo.num_generations_per_prompt = 16
    rows = make_rows(**BROKEN["failed_rollouts"])[:170]

    def log(logger: RunLogger, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            logger.log_step(row["step"], {name: row[name] for name in row if name != "step"}, {"total": 1.0}, {})

    logger = RunLogger(tmp_path, config)
    log(logger, rows)
    assert logger.alarms == []
    assert logger.stop_reason is not None
    logger.close()
    (alarm,) = read_alarms(tmp_path)
    assert (alarm["name"], alarm["text"]) == ("failed_rollouts", "5% of the rollouts of the last 10 steps failed")
    assert f"alarm failed_rollouts in step {alarm['step']}: 5% of the rollouts" in capsys.readouterr().out
    logger = RunLogger(tmp_path, config, resume_step=165)
    log(logger, rows[165:])
    assert logger.stop_reason is None
    logger.close()
    assert read_alarms(tmp_path) == [alarm]
    RunLogger(tmp_path, config, resume_step=100).close()
    assert read_alarms(tmp_path) == []


def test_alarms_that_are_off_are_not_raised() -> None:
    watch = AlarmWatch(SAMPLES, ["gradient_spike"])
    assert not [alarm for row in make_rows(**BROKEN["gradient_spike"]) for alarm in watch.observe_step(row)]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "alarms.jsonl").write_text('{"step": 3, "name": "x", "text": 5}\n')
    with pytest.raises(ValueError, match=r"alarms\.jsonl:1 is damaged"):
        read_alarms(tmp_path)
