"""Files and trackers of a run, what its logger writes about its end, and what it tells the log."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.observability.plots import plot_run
from megatron_grpo.observability.run_files import read_lines, write_json
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.summary import RunEnd, describe_change, write_summary
from megatron_grpo.observability.timing import StepTimer
from tests.support.trajectories import with_learnt


@pytest.fixture
def config() -> Config:
    config = Config()
    config.grpo.max_num_steps = 6
    config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt = 4, 2
    config.logger.tensorboard = False
    return config


def metrics_of(step: int) -> dict[str, float]:
    return {
        "reward": step / 3,
        "accuracy": step / 7,
        "token_mult_prob_error": 1.0 + step * 1e-7,
        "token_mult_prob_error_max": 1.0 + step * 1e-6,
    }


TIMING = {"generation": 0.2, "train": 0.1, "refit": 0.05, "environment": 0.01, "total": 0.4}
THROUGHPUT = {"samples_per_s": 8.0}
TRAJECTORY = Trajectory(
    prompt_idx=3,
    group=0,
    sample=1,
    token_ids=np.array([1, 2, 3], np.int32),
    spans=[Span(1, 3, 5)],
    logprobs=np.array([-0.1, -1 / 3], np.float32),
    response="42",
    stop_reason="stop",
    reward=1.0,
    correct=True,
)


def run_steps(logger: RunLogger, steps: range) -> None:
    if steps.start == 1:
        logger.log_validation(0, {"val_accuracy": 0.3, "val_reward": 0.3}, {"total": 0.2})
    for step in steps:
        if step % 2 == 0:
            logger.log_validation(step, {"val_accuracy": 0.3 + step / 10, "val_reward": 0.0}, {"total": 0.2})
        logger.log_step(step, metrics_of(step), TIMING, THROUGHPUT)
        write_rollouts(locate_rollouts_file(logger.run_dir, step), [(0, with_learnt(TRAJECTORY))])


def without_timing(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key != "timing"} for row in read_lines(folder / "metrics.jsonl")
    ]


def test_a_resumed_run_writes_the_same_files_as_a_straight_one(tmp_path: Path, config: Config) -> None:
    straight = RunLogger(tmp_path / "straight", config)
    run_steps(straight, range(1, 7))
    straight.close()
    killed = RunLogger(tmp_path / "resumed", config)
    run_steps(killed, range(1, 6))  # two steps past the checkpoint of step 3
    killed.close()
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # the line that the kill cut off
    resumed = RunLogger(tmp_path / "resumed", config, resume_step=3)
    assert [row["step"] for row in read_lines(tmp_path / "resumed" / "metrics.jsonl")] == [1, 2, 3]
    assert not (tmp_path / "resumed" / "rollouts" / "step_4.parquet").exists()
    run_steps(resumed, range(4, 7))
    resumed.close()
    assert without_timing(tmp_path / "resumed") == without_timing(tmp_path / "straight")
    for name in ("validation.jsonl", "rollouts/step_6.parquet"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_run_from_the_start_leaves_nothing_of_an_earlier_one(tmp_path: Path, config: Config) -> None:
    for _ in range(2):
        logger = RunLogger(tmp_path, config)
        run_steps(logger, range(1, 3))
        logger.close()
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [row["step"] for row in read_lines(tmp_path / "validation.jsonl")] == [0, 2]


def test_numbers_survive_the_file(tmp_path: Path, config: Config) -> None:
    logger = RunLogger(tmp_path, config)
    values = {"third": 1 / 3, "tiny": 5e-324, "count": 7, "not_a_number": float("nan")}
    logger.log_step(1, values, TIMING, THROUGHPUT)
    (row,) = read_lines(tmp_path / "metrics.jsonl")
    logger.close()
    assert {key: row[key] for key in values} == {**values, "not_a_number": None}


def test_names_known_from_trl(tmp_path: Path, config: Config) -> None:
    logger = RunLogger(tmp_path, config)
    logger.log_step(1, {"response_length": 3.5, "kl_penalty": 0.25}, TIMING, THROUGHPUT)
    logger.log_step(2, {"response_length": 4.0}, TIMING, THROUGHPUT)
    logger.close()
    with_reference, without = read_lines(tmp_path / "metrics.jsonl")
    assert (with_reference["completion_length"], with_reference["kl"]) == (3.5, 0.25)
    assert without["completion_length"] == 4.0
    assert "kl" not in without


def test_the_summary_counts_the_whole_run(tmp_path: Path, config: Config) -> None:
    logger = RunLogger(tmp_path, config)
    run_steps(logger, range(1, 7))
    logger.close()
    summary = write_summary(tmp_path, startup_s=3.0, train_s=4.0, samples_per_step=8)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    steps = read_lines(tmp_path / "metrics.jsonl")
    total = sum(step["timing"]["total"] for step in steps)
    assert total >= 6 * 0.4
    expected = {
        "steps": 6,
        "samples": 48,
        "accuracy_before": 0.3,
        "accuracy_after": 0.9,
        "accuracy_before_step": 0,
        "accuracy_after_step": 6,
        "startup_s": 3.0,
        "train_s": 4.0,
        "samples_per_s": 48 / total,
        "overhead_fraction": 1 - 6 * 0.35 / total,
        "token_mult_prob_error_max": 1.000006,
        "reward_first": sum(range(1, 7)) / 18,
    }
    assert {key: summary[key] for key in expected} == pytest.approx(expected)
    assert summary["phase_s"]["generation"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("steps", "validations", "text"),
    [
        ([{"loss": 2.0}, {"loss": 1.5}], [], "loss 2.000 -> 1.500"),
        ([{"loss": 2.0}, {"loss": 1.5}], [{"val_loss": 2.1}, {"val_loss": 1.6}], "held-out loss 2.100 -> 1.600"),
        ([{"loss": 0.0, "reward": 0.25}], [], "reward 0.250 -> 0.250"),
        ([{"reward": 0.25}], [{"val_accuracy": 0.5}], "held-out accuracy 0.500 -> 0.500"),
        ([], [], ""),
    ],
)
def test_the_last_line_has_the_most_telling_figure(
    tmp_path: Path, steps: list[dict[str, float]], validations: list[dict[str, float]], text: str
) -> None:
    for name, rows in (("metrics.jsonl", steps), ("validation.jsonl", validations)):
        lines = [json.dumps({"step": step, **row, "timing": {"total": 1.0}}) for step, row in enumerate(rows, 1)]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    assert describe_change(tmp_path, write_summary(tmp_path, samples_per_step=8)) == text


def test_a_run_without_steps_has_a_summary_and_a_plot(tmp_path: Path) -> None:
    summary = write_summary(tmp_path, startup_s=1.0, train_s=0.0, samples_per_step=8)
    assert summary["steps"] == 0
    assert summary["accuracy_after"] is summary["samples_per_s"] is summary["overhead_fraction"] is None
    assert plot_run(tmp_path).exists()


@pytest.mark.parametrize(("errors", "scale"), [([1.0000003, 14_838.0, 1.0], "log"), ([1.0, 1.0], "linear")])
def test_the_plot_has_the_mismatch_on_a_logarithmic_axis(
    errors: list[float], scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: (drawn.append(figure), Path(file).touch()))
    rows = [{"step": n + 1, "token_mult_prob_error": error, "timing": {"total": 1.0}} for n, error in enumerate(errors)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_run(tmp_path)
    (axes,) = [axes for axes in drawn[0].axes if axes.get_title().startswith("Mismatch")]
    assert axes.get_yscale() == scale
    (line,) = axes.get_lines()
    assert list(line.get_ydata()) == pytest.approx([error - 1 for error in errors])


@pytest.mark.parametrize(
    ("algorithm", "titles"),
    [
        ("grpo", ["Reward", "Accuracy", "Gradient norm"]),
        ("sft", ["Loss", "Accuracy", "Gradient norm"]),
        ("dpo", ["Loss", "Preference accuracy", "Gradient norm"]),
        ("distillation", ["Teacher divergence", "Reward", "Gradient norm"]),
    ],
)
def test_the_plot_begins_with_the_figures_of_the_algorithm(
    algorithm: str, titles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: (drawn.append(figure), Path(file).touch()))
    rows = [{"step": n, "loss": 1 / n, "timing": {"total": 1.0}} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "validation.jsonl").write_text(json.dumps({"step": 2, "val_loss": 0.25}) + "\n")
    plot_run(tmp_path, ALGORITHMS[algorithm].leading_metrics)
    assert [axes.get_title() for axes in drawn[0].axes] == [*titles, "Seconds of each step, by phase"]
    if titles[0] == "Loss":
        values = {line.get_label(): list(line.get_ydata()) for line in drawn[0].axes[0].get_lines()}
        assert (values["each step"], values["held out"]) == ([1.0, 0.5], [0.25])


def test_finishing_writes_summary_and_plot(tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    logger = RunLogger(tmp_path, config)
    parts = {"ray": 1.5, "engine": 2.0}
    logger.log_start(startup_s=2.5, parts=parts, changes=["grpo.max_num_steps: 3 -> 6"])
    run_steps(logger, range(1, 7))
    logger.finish()
    logger.close()
    logger.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["startup_s"] == 2.5
    assert summary["startup_parts_s"] == {"ray": 1.5, "engine": 2.0}
    assert summary["steps"] == 6
    assert (summary["outcome"], summary["reason"]) == ("completed", None)
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[1] > 1000
    assert len({tuple(pixel) for pixel in picture[::7, ::7].reshape(-1, picture.shape[2]).tolist()}) > 10
    printed = capsys.readouterr().out
    assert "grpo.max_num_steps: 3 -> 6" in printed
    assert "step 6/6" in printed
    assert "0.300 -> 0.900" in printed


def test_tensorboard_gets_every_number(tmp_path: Path, config: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.logger.tensorboard = True
    logger = RunLogger(tmp_path, config)
    run_steps(logger, range(1, 4))
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [
        (step, pytest.approx(step / 3)) for step in (1, 2, 3)
    ]
    assert {"timing/generation", "validation/val_accuracy"} <= set(events.Tags()["scalars"])


def test_wandb_without_its_package_is_one_clear_message(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    config.logger.wandb.enabled = True
    with pytest.raises(RunError, match=r"logger\.wandb\.enabled"):
        RunLogger(tmp_path, config)


def test_each_run_directory_is_a_wandb_run_of_its_own(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's side is played: what it is asked for, and what it answers when nobody is logged in."""
    wandb_runs: list[dict[str, Any]] = []

    class Error(Exception):
        pass

    def init(**arguments: Any) -> SimpleNamespace:
        wandb_runs.append(arguments)
        if len(wandb_runs) == 4:
            raise Error("no API key")
        nothing = ("log", "finish", "define_metric")
        return SimpleNamespace(**{name: lambda *_, **__: None for name in nothing})

    played = SimpleNamespace(init=init, errors=SimpleNamespace(Error=Error))
    monkeypatch.setitem(__import__("sys").modules, "wandb", played)
    config.logger.wandb.enabled = True
    for folder in ("a/run", "b/run", "a/run"):
        RunLogger(tmp_path / folder, config).close()
    first, second, again = wandb_runs
    assert first["id"] == again["id"] != second["id"]
    assert {wandb_run["name"] for wandb_run in wandb_runs} == {"run"}
    assert {wandb_run["resume"] for wandb_run in wandb_runs} == {"allow"}
    with pytest.raises(RunError, match=r"logger\.wandb\.enabled=true, and W&B does not start: no API key"):
        RunLogger(tmp_path / "c", config)


def test_a_run_that_starts_anew_hides_the_events_of_the_one_before(tmp_path: Path, config: Config) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.logger.tensorboard = True
    for steps in (range(1, 7), range(1, 3)):
        logger = RunLogger(tmp_path, config)
        run_steps(logger, steps)
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2]
    assert [event.step for event in events.Scalars("validation/val_accuracy")] == [0, 2]


def test_the_timer_adds_up_phases() -> None:
    timer = StepTimer()
    for _ in range(2):
        with timer.phase("generation"):
            time.sleep(0.02)
    with pytest.raises(ValueError, match="inside"), timer.phase("train"):
        raise ValueError("inside the phase")
    seconds = timer.seconds
    assert 0.04 <= seconds["generation"] <= seconds["total"]
    assert set(seconds) == {"generation", "train", "total"}
    assert sum(seconds.values()) - seconds["total"] <= seconds["total"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    with pytest.raises(TypeError):
        write_json(path, {"steps": object()})
    assert json.loads(path.read_text()) == {"steps": 1}


END_TIMING = {"generation": 0.2, "train": 0.1, "total": 0.4}


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[RunLogger]:
    config = Config()
    config.logger.tensorboard = False
    logger = RunLogger(tmp_path, config)
    logger.log_start(startup_s=2.5, parts={"ray": 1.5, "engine": 2.0})
    for step in (1, 2):
        logger.log_step(step, {"reward": 0.5}, END_TIMING, {})
    yield logger
    logger.close()


def test_a_run_that_ends_early_says_why(logger: RunLogger, tmp_path: Path) -> None:
    logger.end_early("early_stop", "val_accuracy is 0.9")
    logger.finish()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"]) == ("early_stop", "val_accuracy is 0.9")
    assert summary["steps"] == 2


def test_a_run_that_makes_all_its_steps_has_no_reason(logger: RunLogger, tmp_path: Path) -> None:
    logger.finish()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"]) == ("completed", None)


def test_a_failure_is_written_with_all_that_is_known(logger: RunLogger, tmp_path: Path) -> None:
    logger.write_summary(RunEnd("failed", "the engine died"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"], summary["steps"]) == ("failed", "the engine died", 2)
    assert summary["startup_s"] == 2.5
    assert summary["startup_parts_s"] == {"ray": 1.5, "engine": 2.0}
    assert summary["step_s"] == pytest.approx(0.4, abs=0.1)
    assert 0 <= summary["train_s"] < 60


def test_what_is_printed_is_in_the_driver_s_log(logger: RunLogger, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "megatron_grpo"):
        logger.note("100% of the data is used up")
        logger.log_step(3, {"reward": 0.5}, {"total": 0.0}, {})
    message, step = [record.getMessage() for record in caplog.records]
    assert message == "100% of the data is used up"
    assert step.startswith("step 3 took 0.0")
