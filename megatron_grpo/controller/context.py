"""A run in progress: the processes, data and state that the steps of an algorithm work with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.cluster.futures import is_lost
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.schema import Config
from megatron_grpo.controller.checkpoints import Checkpointer
from megatron_grpo.controller.directory import POLICY_FOLDER, VALUE_FOLDER
from megatron_grpo.controller.failures import FiniteGuard
from megatron_grpo.controller.oversampling import Oversampling
from megatron_grpo.controller.recordings import RecordedSteps, RolloutDumps
from megatron_grpo.controller.sample_buffer import SampleBuffer
from megatron_grpo.controller.save_state import GRPOSaveState
from megatron_grpo.controller.user_objects import Callbacks
from megatron_grpo.data.loader import Batches
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.value import MseValueLossFn
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.sampler.engine_group import VllmGeneration
from megatron_grpo.sampler.pool import RolloutPool
from megatron_grpo.trainer.group import MegatronPolicy, MegatronValue, RankGroup
from megatron_grpo.weights.refit.transport import WeightTransport

logger = logging.getLogger(__name__)


class Placement:
    """Engines and models have separate devices, so nothing is moved; `Colocated` overrides these calls."""

    def wake_engines(self, timer: StepTimer) -> None:
        """Make engines ready to sample until `offload_engines`; the timer counts the seconds."""

    def offload_engines(self, timer: StepTimer) -> None:
        """Make models ready to compute and to be saved, until `wake_engines` or a refit."""

    @contextmanager
    def refit(self, timer: StepTimer) -> Iterator[None]:
        """Scope of a refit, which starts with models ready and ends with engines ready to sample."""
        yield


class Colocated(Placement):
    """Engines and models share devices, whose memory holds one of them at a time, and in a refit the weights of both.

    At construction engines sleep and models are on the devices.

    Args:
        generation: the engines.
        policy: the model whose weights a refit sends.
        others: other trained models.
    """

    def __init__(self, generation: VllmGeneration, policy: RankGroup, others: Sequence[RankGroup] = ()) -> None:
        self._generation, self._policy, self._others = generation, policy, others
        self._sampling = False
        self._unsettled = False
        """In a refit, or after a failure: engines may be partly awake, or not answer."""

    def wake_engines(self, timer: StepTimer) -> None:
        """Engines restore their previous weights from host memory, without a refit."""
        if not self._sampling:
            with self.refit(timer):
                pass

    def offload_engines(self, timer: StepTimer) -> None:
        """Put engines to sleep and load the models onto the devices.

        Raises:
            SamplingError: an engine failed; called again, this brings the models back all the same, to be saved.
            RunError: a rank of a model failed.
        """
        if not self._sampling and not self._unsettled:
            return
        with timer.phase("sleep"):
            try:
                self._generation.sleep()
            except RunError as error:
                if not self._unsettled and not is_lost(error.__cause__):  # a lost engine holds no memory
                    self._unsettled = True
                    raise SamplingError(str(error)) from error
                logger.warning("what is trained comes back to the devices, although %s", error)
        with timer.phase("onload"):
            for model in (self._policy, *self._others):
                model.onload()
        self._sampling = self._unsettled = False

    @contextmanager
    def refit(self, timer: StepTimer) -> Iterator[None]:
        """Offload optimizer and other models before the refit, and the policy's weights after it."""
        self._unsettled = True  # until every part has succeeded
        with timer.phase("offload"):
            self._policy.offload(weights=False)
            for model in self._others:
                model.offload(weights=True)
        with timer.phase("wake"):
            self._generation.wake("weights")
        yield
        with timer.phase("offload"):
            self._policy.offload(weights=True)
        with timer.phase("wake"):
            self._generation.wake("kv_cache")
        self._sampling, self._unsettled = True, False


@dataclass(kw_only=True)
class SampleSource:
    """Source of the samples of each step, with the state that it keeps between steps."""

    config: Config
    rollouts: RolloutPool
    settings: SamplingSettings
    guard: FiniteGuard
    state: GRPOSaveState
    """Progress of the run, in which sampling counts the prompts and generation batches that it uses."""
    waiting: list[SampledGroup]
    """Groups that dynamic sampling keeps for the step that is being filled; changed in place."""
    buffer: SampleBuffer | Oversampling | None = None
    """Samples of coming steps, drawn while a step trains; None: sampling is synchronous."""
    recorded: RecordedSteps | None = None
    """Recorded samples of an earlier run, which replace sampling; None: the run samples."""

    @property
    def used_up(self) -> str:
        """Why the run ends when nothing is left for a further step."""
        epochs = self.config.loop.max_num_epochs
        return f"the data is used up: {epochs} epoch(s)" if self.recorded is None else self.recorded.used_up


@dataclass(kw_only=True)
class SamplingRun:
    """A run that samples and scores without training."""

    config: Config
    placement: Placement
    """Whether engines and models share devices."""
    rollouts: RolloutPool
    samples: SampleSource
    """Source of the samples of a step; `sample` advances it."""
    dumps: RolloutDumps
    guard: FiniteGuard
    loader: Batches
    val_prompts: list[DatumSpec]
    logger: RunLogger
    checkpointer: Checkpointer
    state: GRPOSaveState
    """Progress of the run."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """Callbacks of a script."""

    def position(self) -> dict[str, Any]:
        """State of the loader after the last prompts that a step has taken, without those of the sample buffer."""
        buffer = self.samples.buffer
        return self.loader.state_dict() if buffer is None else buffer.position

    def models_by_folder(self) -> dict[str, RankGroup]:
        """Trained models, by their folder in a checkpoint."""
        return {}

    def models(self) -> list[RankGroup]:
        """Trained models."""
        return list(self.models_by_folder().values())

    def save_models(self, folder: Path, *, background: bool = False) -> None:
        """Write the trained models into the folder of a checkpoint; with `background`, only begin to."""
        self.placement.offload_engines(StepTimer())
        for name, model in self.models_by_folder().items():
            (folder / name).mkdir()
            model.save_checkpoint(str(folder / name), background=background)


@dataclass(kw_only=True)
class GRPORun(SamplingRun):
    """A run of GRPO."""

    policy: MegatronPolicy
    transport: WeightTransport | None
    """Transport of the policy's weights to the engines; None: there are no engines."""
    loss_fn: ClippedPGLossFn

    def models_by_folder(self) -> dict[str, RankGroup]:
        return {POLICY_FOLDER: self.policy}


@dataclass(kw_only=True)
class PPORun(GRPORun):
    """A run of PPO: one of GRPO with a value model."""

    value: MegatronValue
    value_loss_fn: MseValueLossFn

    def models_by_folder(self) -> dict[str, RankGroup]:
        return {**super().models_by_folder(), VALUE_FOLDER: self.value}
