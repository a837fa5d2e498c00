"""A run in progress: the processes, data and progress that the steps of an algorithm work with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict

from megatron_grpo.algorithms.elastic import EngineResizer
from megatron_grpo.algorithms.placement import Placement
from megatron_grpo.algorithms.records import RecordedSteps, RolloutDumps, StepCheck
from megatron_grpo.algorithms.sample_buffer import SampleBuffer
from megatron_grpo.batch.generation_requests import EngineCounts, SamplingSettings
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.config.schema import Config
from megatron_grpo.data.load_prompts import PromptData
from megatron_grpo.data.loader import BatchLoader
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.generation.teacher_client import TeacherServer
from megatron_grpo.losses.loss import LossFunction, make_loss
from megatron_grpo.losses.value import MseValueLossFn
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.checkpoints import Checkpointer
from megatron_grpo.run.directory import POLICY_FOLDER, VALUE_FOLDER
from megatron_grpo.run.launch import Models
from megatron_grpo.run.user_objects import Callbacks
from megatron_grpo.trainer.model_ranks import MegatronPolicy, MegatronTeacher, MegatronValue, ModelRanks
from megatron_grpo.weight_sync.transport import WeightTransport


class EarlyStopState(TypedDict):
    """State of early stopping; part of the checkpoint."""

    best: float | None
    last: float | None
    waited: int  # validations in a row that did not improve on the best


class EpisodeState(TypedDict):
    """An episode of steps in which training and generation disagree (prob_error.py)."""

    first_step: int
    last_step: int  # beyond the bound
    steps: int  # beyond the bound
    calm_steps: int  # within the bound since then
    worst_error: float  # largest token_mult_prob_error
    reported_ratio: float  # excess over the bound, relative to it, of the last step that a message was about


class ProbErrorState(TypedDict):
    """The probability errors of healthy steps, and the current episode of unhealthy ones (prob_error.py)."""

    precision: str  # of policy and engines when the noise was measured
    fresh: list[float]  # excess of token_mult_prob_error over 1 in the first steps, for tokens of the current weights
    stale: list[float]  # gen_kl_error of the latest steps, for tokens of older weights
    episode: EpisodeState | None  # None: the latest steps agree
    episodes: int  # episodes of the run so far


class IdleTensorState(TypedDict):
    """Tensors whose gradient is exactly zero (idle_tensors.py)."""

    since: dict[str, int]  # by name, the first of the latest steps without gradient
    reported: list[str]


class GRPOSaveState(TypedDict):
    """Progress of a GRPO run."""

    consumed_samples: int  # prompts used so far
    current_step: int  # steps in the current epoch
    current_epoch: int
    total_steps: int  # steps so far; also the policy's weight version
    generation_batches: int  # batches of prompts sampled so far; more than steps with dynamic sampling
    total_valid_tokens: int  # tokens in the loss, summed over all steps
    early_stop: EarlyStopState
    prob_error: NotRequired[ProbErrorState]  # absent before the first step that has a probability error
    idle_tensors: NotRequired[IdleTensorState]  # absent before the first such tensor
    task_baselines: NotRequired[dict[str, float]]  # running mean of the rewards of each task; absent without any
    val_step: NotRequired[int]  # steps before the last validation
    val_reward: NotRequired[float | None]
    val_accuracy: NotRequired[float | None]


def make_save_state() -> GRPOSaveState:
    """Make the progress of a run before its first step."""
    return GRPOSaveState(
        consumed_samples=0,
        current_step=0,
        current_epoch=0,
        total_steps=0,
        generation_batches=0,
        total_valid_tokens=0,
        early_stop=EarlyStopState(best=None, last=None, waited=0),
    )


@dataclass(kw_only=True)
class SamplingRun:
    """A run that samples and scores without training."""

    config: Config
    run_dir: Path
    placement: Placement
    rollouts: RolloutPool
    settings: SamplingSettings
    dumps: RolloutDumps
    loader: BatchLoader  # loader of the training prompts, or a recording, whose rollouts replace sampling
    val_prompts: list[DatumSpec]
    logger: RunLogger
    checkpointer: Checkpointer
    state: GRPOSaveState
    batch_cache: list[SampledGroup]
    """Groups that dynamic sampling keeps for the step that is being filled; changed in place."""
    buffer: SampleBuffer | None = None
    """Samples of coming steps, drawn while a step trains; None: sampling is synchronous."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    can_restart: bool = False  # ranks that are lost start again, and the run goes on from its newest checkpoint
    resizer: EngineResizer | None = None  # of the engines; None: there are none
    counts_before_validation: dict[int, EngineCounts] = field(default_factory=dict)
    """Counts of the engines between the last step and a validation, for the next step; empty without one."""

    def take_engine_counts(self) -> dict[int, EngineCounts]:
        """Return the engines' counts since the last step, without validation."""
        counts = self.rollouts.take_engine_counts()
        earlier, self.counts_before_validation = self.counts_before_validation, {}
        joined = {number: before + counts.get(number, EngineCounts()) for number, before in earlier.items()}
        return counts | joined

    def make_check(self, groups: Sequence[SampledGroup], step: int, dataset: str = "training") -> StepCheck:
        """Make the check of a step's values; `dataset` is for messages."""
        return StepCheck(self.run_dir, self.rollouts.fetch, groups, step, dataset)

    def refresh_engines(self, timer: StepTimer) -> None:
        """Publish the current weights before a validation, unless every step does."""

    def measure_held_out(self, timer: StepTimer) -> dict[str, float]:
        """Measure figures of held-out rows that need no sampling; here there are none."""
        return {}

    @property
    def loader_state(self) -> dict[str, Any]:
        """Position in the data after the last step."""
        return self.loader.state_dict() if self.buffer is None else self.buffer.loader_state

    @property
    def end_of_data(self) -> str:
        """Message for the end of the prompts or recorded steps."""
        if isinstance(self.loader, RecordedSteps):
            return self.loader.end_of_data
        return f"the data is used up: {self.config.loop.max_num_epochs} epoch(s)"

    @property
    def models(self) -> dict[str, ModelRanks]:
        """Trained models, by their folder in a checkpoint."""
        return {}


@dataclass(kw_only=True)
class TrainingRun(SamplingRun):
    """A run that trains a policy, with what its algorithm has beside it."""

    policy: MegatronPolicy
    transport: WeightTransport | None  # transport of the policy's weights to the engines; None: there are no engines
    loss_fn: LossFunction
    value: MegatronValue | None = None
    value_loss_fn: MseValueLossFn | None = None
    teachers: dict[str, MegatronTeacher | TeacherServer] = field(default_factory=dict)
    """Teachers by section of the configuration."""
    val_rows: list[DatumSpec] = field(default_factory=list)  # rows of the held-out loss

    @classmethod
    def build(cls, sampling: SamplingRun, models: Models, transport: WeightTransport | None, data: PromptData) -> Self:
        """Build the run from its parts."""
        config = sampling.config
        return cls(
            **vars(sampling),
            policy=models.policy,
            transport=transport,
            loss_fn=make_loss(config),
            value=models.value,
            value_loss_fn=None if models.value is None else MseValueLossFn(config.value_loss_fn),
            teachers=models.teachers,
            val_rows=data.val_rows,
            **cls.select_fields(data),
        )

    @classmethod
    def select_fields(cls, data: PromptData) -> dict[str, Any]:
        """Select the values of the fields that a subclass adds."""
        return {}

    @property
    def models(self) -> dict[str, ModelRanks]:
        value = {} if self.value is None else {VALUE_FOLDER: self.value}
        return {POLICY_FOLDER: self.policy, **value}


class GRPORun(TrainingRun):
    """A run of GRPO."""


@dataclass(kw_only=True)
class PPORun(GRPORun):
    """A run of PPO: one of GRPO with a value model."""

    value: MegatronValue
    value_loss_fn: MseValueLossFn


class DistillationRun(GRPORun):
    """A run of distillation: one of GRPO with teachers."""
