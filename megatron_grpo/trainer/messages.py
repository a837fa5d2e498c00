"""Messages between the driver and the ranks of a model: settings, work and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_grpo.cluster.actor_processes import ActorProcesses
from megatron_grpo.config.schema import GenerationConfig, PolicyConfig, ReferenceConfig
from megatron_grpo.losses.named_formula import NamedFormula
from megatron_grpo.models.shape import ModelShape
from megatron_grpo_kernels.token_filter import TokenFilter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron_grpo.batch.step_batch import StepBatch

ReplicaWork = tuple["StepBatch", list[list[int]]]
"""A replica's part of a batch, and for each microbatch the indices of its sequences in that part."""

ForwardResult = tuple[list[Any], "NDArray[np.bool_]"]
"""A forward pass's numbers: for each partition a reference to [tokens of the partition], float32; and [sequences]:
True where all numbers at sampled tokens are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherOutput:
    """What a teacher's ranks compute for a token."""

    vocab: int  # tokens that the policy and its teachers share, the first ones of each model
    top_k: int | None  # number of likeliest tokens; None: the hidden state that the head multiplies


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """A teacher whose head the policy's ranks hold."""

    folder: str
    shape: ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDistillation:
    """How the policy's ranks compare it with its teachers."""

    vocab: int  # as in `TeacherOutput`
    kl_type: Literal["reverse", "forward", "mixed", "jensen_shannon"]
    mixed_kl_weight: float
    heads: tuple[TeacherHead, ...] = ()  # of teachers by their number; empty: they give their likeliest tokens
    self_output: TeacherOutput | None = None  # what the policy computes as its own teacher; None: others teach it


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Everything that a rank of a model is built from."""

    config: PolicyConfig
    shape: ModelShape  # sizes of the model; its head makes it a policy, value or reward model
    folder: str  # the model's folder in Hugging Face format; empty: weights stay uninitialised, in a dry run
    decay_steps: int  # optimizer steps of the learning-rate schedule
    decay: NamedFormula | None = None  # the user's own decay of the learning rate; None: a built-in one
    reference: ReferenceConfig | None = None
    temperature: float = 1.0  # of sampling, at which the policy's log-probabilities are taken
    token_filter: TokenFilter | None = None
    """Tokens over which the policy's log-probabilities are taken, but not the reference's; None: all."""
    teacher: TeacherOutput | None = None  # makes the model a teacher; None: it is trained
    distillation: PolicyDistillation | None = None  # of a policy with teachers
    never_sampled: tuple[int, ...] = ()  # tokens that engines never draw, and log-probabilities leave out
    images_folder: str = ""  # store of the images that sequences have; empty: they have none
    seed: int = 0
    ranks_per_machine: int | None = None  # at most; None: all are on one
    shares_cores: bool = False  # with engines that run at the same time as the ranks, on a CPU

    @property
    def logit_scale(self) -> float:
        """Factor of the logits: one over the temperature."""
        # Greedy sampling is compared at temperature 1.
        return 1.0 / self.temperature if self.temperature > 0 else 1.0


def make_training_filter(generation: GenerationConfig) -> TokenFilter | None:
    """Make the sampling filter that the policy's ranks apply too, if any."""
    if not generation.has_training_filter:
        return None
    return TokenFilter(generation.top_k, generation.top_p, generation.min_p)


@dataclass(frozen=True)
class RankReport:
    """A rank's report after its start."""

    data_rank: int  # which replica the rank belongs to
    device_name: str  # the vendor's name of the GPU; "cpu" without one
    startup_s: dict[str, float]
    """Seconds of the rank's start by part: "imports"; "model" (process groups, the model and its weights)."""
    processes: ActorProcesses


@dataclass(frozen=True, slots=True)
class RankTrainResult:
    """One rank's answer to an optimizer step.

    Example: `RankTrainResult(grad_norm=0.8, learning_rate=1e-6, metrics=[{"loss": 0.01}, {"loss": 0.02}])`.
    """

    grad_norm: float  # global L2 norm of the gradient; when it is not finite the optimizer step was not made
    learning_rate: float
    metrics: list[dict[str, float]] | None
    """Loss and metrics of each microbatch of the rank; None on ranks without the loss."""
    gpu_memory_gib: float = 0.0
    """Peak memory of the rank's tensors on its GPU since the previous optimizer step, GiB; 0 on a CPU."""
    is_refused: bool = False
    """Whether the probability error was beyond its limit, so that the optimizer step was not made."""
    zero_gradients: tuple[str, ...] = ()
    """Tensors whose gradient is exactly zero on this rank."""
    probe_s: float = 0.0
    """Seconds of a fixed computation on the rank's device after the step (rank_speed.py)."""
