"""What a script is told of a run that it looks on, and how it ends one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.observability.alarms import Alarm
from megatron_grpo.run.directory import STOP_FILE, lock_run_directory
from megatron_grpo.run.user_objects import Callback, Callbacks
from tests.support.loop_run import LIMITS, Run, validating


class Stopper(Callback):
    """Puts the file that ends a run into its folder during the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, step: int, metrics: Any) -> None:
        (self.folder / STOP_FILE).touch()


class Watcher(Callback):
    """Writes down what it is told, and wants training to end after a step."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.told: list[Any] = []

    def on_step(self, step: int, metrics: Any) -> bool:
        self.told.append(("step", step, metrics["loss"]))
        return step == self.last

    def on_validation(self, step: int, metrics: Any) -> None:
        self.told.append(("validation", step, metrics["val_reward"]))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        assert folder.name == f"step_{step}"
        self.told.append(("checkpoint", step))

    def on_end(self, step: int) -> None:
        self.told.append(("end", step))


class Saver(Callback):
    """Wants a checkpoint of the third step, and keeps what it is told of starts and checkpoints."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, step: int, run_dir: Path) -> None:
        self.told.append((step, run_dir))

    def on_step(self, step: int, metrics: Any) -> Literal["save"] | None:
        return "save" if step == 3 else None

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self.told.append((step, folder))


def test_a_callback_may_ask_for_a_checkpoint(tmp_path: Path) -> None:
    run, saver = Run(tmp_path), Saver()
    run.callbacks = Callbacks([saver])
    run.checkpointer.on_complete = partial(run.callbacks.notify, "on_checkpoint")
    run.train(steps=5)
    folder = tmp_path / "checkpoints"
    assert saver.told == [(0, tmp_path), *((step, folder / f"step_{step}") for step in (2, 3, 4, 5))]


def test_callbacks_are_told_and_may_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validating(monkeypatch, {"val_reward": 0.25})
    run, watcher = Run(tmp_path, replace(LIMITS, val_period=2)), Watcher(last=3)
    run.callbacks = Callbacks([watcher])
    run.checkpointer.on_complete = partial(run.callbacks.notify, "on_checkpoint")
    run.train()
    assert watcher.told == [
        ("step", 1, 0.5),
        ("validation", 2, 0.25),
        ("step", 2, 0.5),
        ("checkpoint", 2),
        ("step", 3, 0.5),
        ("checkpoint", 3),
        ("end", 3),
    ]
    assert run.ends == [("early_stop", "a callback asked for it")]


def test_a_file_in_the_folder_ends_training_with_a_checkpoint_and_no_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm's launcher asks for it shortly before the job's time is up."""
    validating(monkeypatch, AssertionError("there is no time for it"))
    run = Run(tmp_path, replace(LIMITS, val_at_end=True))
    run.callbacks = Callbacks([Stopper(tmp_path)])
    run.train()
    assert run.ends == [("early_stop", "the file stop is in the run's folder")]
    assert run.checkpointer.list_steps() == [1]
    with lock_run_directory(str(tmp_path)):
        assert not (tmp_path / STOP_FILE).exists(), "the next start goes on"


def test_a_callback_that_fails_ends_the_run_under_its_name(tmp_path: Path) -> None:
    class Broken(Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            raise KeyError("missing")

    run = Run(tmp_path)
    run.callbacks = Callbacks([Broken()])
    with pytest.raises(RunError, match=r"callback Broken.on_step raised KeyError: 'missing'"):
        run.train(steps=3)


class AlarmKeeper(Callback):
    """Writes down alarms, and the steps that come after them."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_alarm(self, alarm: Alarm) -> None:
        self.told.append(alarm)

    def on_step(self, step: int, metrics: Any) -> None:
        self.told.append(step)


@pytest.mark.parametrize(("reason", "last"), [(None, 3), ("alarm kl_growth (logger.alarms_stop): too much", 2)])
def test_an_alarm_is_told_before_its_step_and_may_end_training(tmp_path: Path, reason: str | None, last: int) -> None:
    keeper, run = AlarmKeeper(), Run(tmp_path, LIMITS)
    run.callbacks = Callbacks([keeper])
    alarm = Alarm(2, "kl_growth", "too much")

    def log_step(step: int, *_: object) -> None:
        run.logger.alarms = [alarm] if step == 2 else []
        run.logger.stop_reason = reason if step >= 2 else None

    run.logger.log_step = log_step
    run.train(steps=3)
    assert keeper.told == [1, alarm, 2, 3][: last + 1]
    if reason is not None:
        assert run.ends == [("early_stop", reason)]
