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
class SamplingRun:
    """A run that samples and scores, and trains nothing."""

    config: Config
    placement: Placement
    """Who has the devices when."""
    rollouts: RolloutPool
    samples: SampleSource
    """Where the samples of a step come from; `sample` advances it."""
    dumps: RolloutDumps
    guard: FiniteGuard
    loader: Batches
    val_prompts: list[DatumSpec]
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

    def models_by_folder(self) -> dict[str, TrainedModel]:
        """What is trained, by its folder in a checkpoint."""
        return {}

    def models(self) -> list[TrainedModel]:
        """What is trained."""
        return list(self.models_by_folder().values())

    def save_models(self, folder: Path, *, background: bool = False) -> None:
        """Write what is trained into the folder of a checkpoint; in the background, only begin to."""
        self.placement.turn_to_training(StepTimer())
        for name, model in self.models_by_folder().items():
            (folder / name).mkdir()
            model.save_checkpoint(str(folder / name), background=background)


@dataclass(kw_only=True)
class GRPORun(SamplingRun):
    """A run of GRPO."""

    policy: PolicyInterface
    transport: WeightTransport | None
    """How the policy's weights reach the engines; None: there are none."""
    loss_fn: ClippedPGLossFn

    def models_by_folder(self) -> dict[str, TrainedModel]:
        return {POLICY_FOLDER: self.policy}


@dataclass(kw_only=True)
class PPORun(GRPORun):
    """A run of PPO: one of GRPO with a value model."""

    value: ValueInterface
    value_loss_fn: MseValueLossFn

    def models_by_folder(self) -> dict[str, TrainedModel]:
        return {**super().models_by_folder(), VALUE_FOLDER: self.value}
