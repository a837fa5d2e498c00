"""Restarts after lost ranks: how often, what is said, and what is not restarted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms import restarts
from megatron_grpo.config.errors import ModelLostError, RunError
from megatron_grpo.config.schema import CheckpointingConfig, Config
from megatron_grpo.run.checkpoints import Checkpointer
from tests.support.loop_run import Run

LOST = "training step: policy rank 1 died (its process is gone)"


class Scene:
    """Processes that do nothing, and beginnings and trainings that fail as told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beginnings: list[bool] = []
        """Of each, whether it was a restart."""
        self.fails_to_begin: dict[int, Exception] = {}
        self.losses: list[Exception] = []
        """Of trainings, the first first."""
        self.could_restart: list[bool] = []
        self.finished = 0
        self.checkpointer = Checkpointer(folder, CheckpointingConfig())

        @contextmanager
        def start_processes(*_: object) -> Iterator[None]:
            yield

        @contextmanager
        def begin_run(*_: object, is_restart: bool) -> Iterator[Any]:
            self.beginnings.append(is_restart)
            if error := self.fails_to_begin.get(len(self.beginnings)):
                raise error
            yield SimpleNamespace(logger=SimpleNamespace(finish=self._finish))

        monkeypatch.setattr(restarts, "start_processes", start_processes)
        monkeypatch.setattr(restarts, "begin_run", begin_run)

    def _finish(self) -> None:
        self.finished += 1

    def train(self, max_restarts: int | None = None) -> None:
        config = Config()
        if max_restarts is not None:
            config.cluster.max_restarts = max_restarts
        startup: Any = SimpleNamespace(checkpointer=self.checkpointer)

        def fail(run: Any) -> None:
            self.could_restart.append(run.can_restart)
            if self.losses:
                raise self.losses.pop(0)

        restarts.train_with_restarts(config, startup, fail)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_lost_rank_costs_one_warning_that_says_where_the_run_goes_back_to(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.losses = [ModelLostError(LOST), ModelLostError(LOST)]
    (scene.checkpointer.folder / "step_12").mkdir(parents=True)
    scene.train()
    assert (scene.beginnings, scene.could_restart, scene.finished) == ([False, True, True], [True, True, False], 1)
    stay = "; all ranks start again, and the run goes back to step 12; engines, rollout workers and environments stay"
    warnings = [f"restart {number} of 2 (cluster.max_restarts): {LOST}{stay}" for number in (1, 2)]
    assert capsys.readouterr().err.splitlines() == warnings


def test_without_a_checkpoint_the_run_begins_again(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.losses = [ModelLostError(LOST)]
    scene.train(1)
    assert scene.finished == 1
    assert "; all ranks start again, and the run goes back to its start, for want of" in capsys.readouterr().err


def test_the_run_ends_when_its_restarts_are_used_up(scene: Scene) -> None:
    scene.losses = [ModelLostError(LOST)] * 3
    with pytest.raises(ModelLostError) as raised:
        scene.train(2)
    assert str(raised.value) == f"{LOST}; ranks were restarted as often as cluster.max_restarts=2 allows"
    assert scene.could_restart == [True, True, False]


def test_a_rank_that_is_lost_in_a_restart_costs_another(scene: Scene) -> None:
    scene.losses, scene.fails_to_begin = [ModelLostError(LOST)], {2: ModelLostError("loading the checkpoint: gone")}
    scene.train(2)
    assert (scene.beginnings, scene.finished) == ([False, True, True], 1)


@pytest.mark.parametrize(("restarts", "error"), [(0, ModelLostError(LOST)), (2, RunError("the loss is not finite"))])
def test_other_failures_end_the_run_as_they_are(scene: Scene, restarts: int, error: RunError) -> None:
    scene.losses = [error]
    with pytest.raises(type(error)) as raised:
        scene.train(restarts)
    assert raised.value is error
    assert scene.beginnings == [False]


def test_a_rank_that_is_lost_before_the_first_step_ends_the_start(scene: Scene) -> None:
    scene.fails_to_begin = {1: ModelLostError("policy start: policy rank 0 died")}
    with pytest.raises(ModelLostError, match=r"^policy start: policy rank 0 died$"):
        scene.train()


@pytest.mark.parametrize("can_restart", [True, False])
def test_only_a_run_that_ends_waits_for_its_last_checkpoint(can_restart: bool, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.can_restart = can_restart
    waits: list[str] = []
    run.checkpointer.finish = lambda: waits.append("finish")  # type: ignore[method-assign]
    with pytest.raises(ModelLostError) as raised:
        run.train(steps=0, error=ModelLostError(LOST))
    assert (str(raised.value) == LOST) == can_restart, "a run that ends says how to go on"
    assert waits == ([] if can_restart else ["finish"])


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_restart_takes_the_newest_checkpoint_whatever_the_run_began_with(resume: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(steps=3)
    checkpointer = Checkpointer(tmp_path, CheckpointingConfig(resume=resume))
    assert checkpointer.list_steps() == [2, 3]
    assert checkpointer.find_start(is_restart=True) == checkpointer.locate(3)
