"""A run that is up: what the loops of the algorithms work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.loader import Batches
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.value_loss import MseValueLossFn
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.interface import PolicyInterface, TrainedModel, ValueInterface
from megatron_grpo.refit.interface import WeightTransport
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.callbacks import Callbacks
from megatron_grpo.run.checkpointer import Checkpointer
from megatron_grpo.run.directory import POLICY_FOLDER, VALUE_FOLDER
from megatron_grpo.run.dumps import RolloutDumps
from megatron_grpo.run.non_finite import FiniteGuard
from megatron_grpo.run.placement import Placement
from megatron_grpo.run.sample_source import SampleSource
from megatron_grpo.run.save_state import GRPOSaveState


@dataclass(kw_only=True)
class GRPORun:
    """A run of GRPO."""

    config: Config
    policy: PolicyInterface
    transport: WeightTransport
    placement: Placement
    """Who has the devices when."""
    rollouts: RolloutPool
    samples: SampleSource
    """Where the samples of a step come from; `sample` advances it."""
    dumps: RolloutDumps
    guard: FiniteGuard
    loader: Batches
    val_prompts: list[DatumSpec]
    loss_fn: ClippedPGLossFn
    logger: RunLogger
    checkpointer: Checkpointer
    state: GRPOSaveState
    """How far the run has come."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """What a script wants to be told."""

    def position(self) -> dict[str, Any]:
        """State of the loader after the last prompts that a step has taken, whatever is sampled ahead."""
        ahead = self.samples.ahead
        return self.loader.state_dict() if ahead is None else ahead.position

    def models(self) -> list[TrainedModel]:
        """What is trained."""
        return [self.policy]

    def save_models(self, folder: Path, *, background: bool = False) -> None:
        """Write what is trained into the folder of a checkpoint; in the background, only begin to."""
        self.placement.turn_to_training(StepTimer())
        _save(self.policy, folder / POLICY_FOLDER, background)


@dataclass(kw_only=True)
class PPORun(GRPORun):
    """A run of PPO: one of GRPO with a value model."""

    value: ValueInterface
    value_loss_fn: MseValueLossFn

    def models(self) -> list[TrainedModel]:
        return [self.policy, self.value]

    def save_models(self, folder: Path, *, background: bool = False) -> None:
        super().save_models(folder, background=background)
        _save(self.value, folder / VALUE_FOLDER, background)


def _save(model: TrainedModel, folder: Path, background: bool) -> None:
    folder.mkdir()
    model.save_checkpoint(str(folder), background=background)
