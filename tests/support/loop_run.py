"""A run of steps that only say that they were made: what the loop around them does is real."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms import loop as train_loop
from megatron_grpo.algorithms.context import make_save_state
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.placement import Placement
from megatron_grpo.algorithms.step_report import StepReport, UnpublishedStepError
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.config.schema import CheckpointingConfig, Config, GRPOConfig, LossConfig
from megatron_grpo.run.checkpoint_files import read_loader_state, read_state
from megatron_grpo.run.checkpoints import Checkpointer
from megatron_grpo.run.user_objects import Callbacks
from megatron_grpo.weight_sync.refit_calls import RefitError
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import FakeDumps
from tests.support.recorded_run import make_facts
from tests.support.trajectories import make_trajectory

CHECKPOINTING = CheckpointingConfig(save_period=2, metric_name="loss")
LIMITS = GRPOConfig(max_num_steps=9, val_at_start=False, val_period=0, val_at_end=False)
SOUND = {"loss": 0.5, "valid_tokens": 3.0, "optimizer_steps": 1.0}


class Run:
    """A run whose steps do nothing but fail when they are told to."""

    def __init__(self, folder: Path, grpo: GRPOConfig = LIMITS, loss: LossConfig | None = None) -> None:
        self.config = Config(grpo=grpo, checkpointing=CHECKPOINTING, loss_fn=loss or LossConfig())
        self.state, self.run_dir = make_save_state(), folder
        self.used = 0
        """Batches of prompts that steps have taken."""
        self.loader = SimpleNamespace(epoch=0, observe=lambda outcomes: None)
        self.logged: list[str] = []
        self.notes: dict[str, str] = {}
        """Told once, by what they are about."""
        self.ends: list[tuple[str, str]] = []
        self.refit_fails: dict[int, RefitError] = {}
        """By the step whose weights are not published."""
        self.logger = SimpleNamespace(
            run_dir=folder,
            note=self.logged.append,
            end_early=lambda outcome, reason: self.ends.append((outcome, reason)),
            note_once=lambda about, text: self.notes.setdefault(about, text),
            log_step=lambda step, *_: self.logged.append(f"step {step}"),
            log_validation=lambda step, *_: self.logged.append(f"validation {step}"),
            alarms=[],
            stop_reason=None,
        )
        self.dumps: Any = FakeDumps(self.logged)
        self.checkpointer = Checkpointer(folder, CHECKPOINTING)
        self.checkpointer.note = lambda text: self.logger.note(text)
        self.rollouts = FakeRollouts()
        self.can_restart = False
        self.resizer = None
        self.batch_cache: list[SampledGroup] = []
        self.end_of_data = "the data is used up: 1 epoch(s)"
        self.placement = Placement()
        self.callbacks = Callbacks()
        self.write: Callable[[Path], None] = lambda _: None
        """What writes the model of a checkpoint into its folder."""
        model = SimpleNamespace(save_checkpoint=lambda folder, background: self.write(Path(folder)) or {})
        self.models: dict[str, Any] = {"megatron": model}
        self.report = StepReport(SOUND, {}, {}, [])

    @property
    def loader_state(self) -> dict[str, Any]:
        return {"position": self.used, "epoch": 0}

    def train(self, *, steps: int = 99, error: Exception | None = None) -> None:
        """So many steps, then one that samples and fails; without an error the data is used up there."""

        def step(_: object, __: object) -> StepReport | None:
            self.used += 1
            if self.state["total_steps"] < steps:
                number = self.state["total_steps"] + 1
                self.dumps.hold(number, [], None, make_facts())
                self.dumps.begin()
                if number in self.refit_fails:
                    raise UnpublishedStepError(self.report, self.refit_fails[number])
                return self.report
            self.batch_cache[:] = self.rollouts.put([[make_trajectory(3)]])
            self.state["generation_batches"] += 1
            if error is not None:
                raise error
            return None

        train_steps(self, step)  # type: ignore[arg-type]

    def saved(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        path = self.checkpointer.locate(step)
        return read_state(path), read_loader_state(path)


def validating(monkeypatch: pytest.MonkeyPatch, outcome: dict[str, float] | Exception) -> None:
    def validate(*_: object) -> dict[str, float]:
        if isinstance(outcome, Exception):
            raise outcome
        return dict(outcome)

    monkeypatch.setattr(train_loop, "validate", validate)
