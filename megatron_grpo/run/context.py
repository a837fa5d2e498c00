"""A run that is up: what the loops of the algorithms work with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.value_loss import MseValueLossFn
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.policy.interface import PolicyInterface, TrainedModel, ValueInterface
from megatron_grpo.refit.interface import WeightTransport
from megatron_grpo.rollouts.collector import RolloutCollector
from megatron_grpo.run.checkpointer import Checkpointer
from megatron_grpo.run.directory import POLICY_FOLDER, VALUE_FOLDER
from megatron_grpo.run.save_state import GRPOSaveState


@dataclass(kw_only=True)
class GRPORun:
    """A run of GRPO."""

    config: Config
    policy: PolicyInterface
    transport: WeightTransport
    collector: RolloutCollector
    sampling: SamplingSettings
    loader: PromptLoader
    val_prompts: list[DatumSpec]
    loss_fn: ClippedPGLossFn
    logger: RunLogger
    checkpointer: Checkpointer
    state: GRPOSaveState
    batch_cache: list[list[Trajectory]]
    """Groups that dynamic sampling keeps for the step that is being filled."""

    def save_models(self, folder: Path) -> None:
        """Write what is trained into the folder of a checkpoint."""
        _save(self.policy, folder / POLICY_FOLDER)


@dataclass(kw_only=True)
class PPORun(GRPORun):
    """The same with a value model."""

    value: ValueInterface
    value_loss_fn: MseValueLossFn

    def save_models(self, folder: Path) -> None:
        super().save_models(folder)
        _save(self.value, folder / VALUE_FOLDER)


def _save(model: TrainedModel, folder: Path) -> None:
    folder.mkdir()
    model.save_checkpoint(str(folder))
