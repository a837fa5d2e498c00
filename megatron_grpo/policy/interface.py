"""What the rest of the system knows of a model in training: an optimizer step, a checkpoint; and of the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.data.bins import Cost
from megatron_grpo.losses.interface import LossFunction
from megatron_grpo.models.families import forward_flops
from megatron_grpo.models.shape import ModelShape


@dataclass(slots=True)
class TrainResult:
    """The outcome of training on a batch."""

    loss: float
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The loss function's metrics, reduced over all tokens of the step."""
    optimizer_steps: int = 1
    """Optimizer steps whose outcome this is."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one rank knows of an optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradient; when it is not finite the optimizer step was not made."""
    learning_rate: float
    metrics: list[dict[str, float]] | None
    """Loss and metrics of each microbatch of the rank; None unless it reports for its data-parallel replica."""


class NonFiniteGradientError(RunError):
    """The gradient of an optimizer step is NaN or infinite; the step was not made.

    Args:
        grad_norm: norm of the gradient, NaN or infinite.
        sequences: numbers in the step of the sequences that the gradient can come from.
    """

    def __init__(self, grad_norm: float, sequences: list[int]) -> None:
        super().__init__(f"the gradient norm is {grad_norm}; the weights were left as they were")
        self.grad_norm = grad_norm
        self.sequences = sequences


def cost_of(shape: ModelShape) -> Cost:
    """What a sequence costs in a model of these sizes, in floating-point operations of a forward pass.

    Read off the family's count, which is linear in tokens and in the pairs of both kinds of layers.
    """

    def of(length: int) -> float:
        return forward_flops(shape, [length])

    every_pair = of(2) - 2 * of(1)  # two tokens of one sequence see three pairs, those of two sequences see two
    window = shape.window
    if window is None:
        return Cost(per_token=of(1) - every_pair, per_pair=every_pair)
    # Past the window each token sees one more than the token before it only in layers without one.
    per_pair = of(window + 2) - 2 * of(window + 1) + of(window)
    return Cost(of(1) - every_pair, per_pair, window, per_windowed_pair=every_pair - per_pair)


class TrainedModel(ABC):
    """A model in training, spread over many processes, that looks like one."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """Sizes of the model."""

    @property
    def cost(self) -> Cost:
        """What a sequence costs to compute, in floating-point operations of a forward pass."""
        return cost_of(self.shape)

    @property
    @abstractmethod
    def device_name(self) -> str:
        """What a rank runs on, as its vendor calls it; "cpu" without a GPU."""

    @abstractmethod
    def train(self, batch: StepBatch, sequences: NDArray[np.int64], loss_fn: LossFunction) -> TrainResult:
        """One optimizer step, split over data-parallel ranks and microbatches.

        Args:
            batch: the step's batch, whose shards hold what the loss function reads.
            sequences: [chosen], int64: numbers of the sequences to train on, ascending; one has a token in the loss.
            loss_fn: loss function whose sum over all microbatches is the loss.

        Raises:
            NonFiniteGradientError: the weights are untouched.
        """

    @abstractmethod
    def save_checkpoint(self, folder: str, *, background: bool = False) -> None:
        """Write weights, optimizer, schedule and random state to an existing, empty folder.

        Args:
            background: only begin to, and return as soon as the model may change; `finish_checkpoint` has to follow.
        """

    @abstractmethod
    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait for a checkpoint that is written in the background."""

    @abstractmethod
    def finish_checkpoint(self) -> None:
        """Complete a checkpoint that is written in the background.

        Raises:
            RunError: a rank could not write its part.
        """

    @abstractmethod
    def load_checkpoint(self, folder: str) -> None:
        """Read what `save_checkpoint` wrote, also from a checkpoint of another layout."""

    @abstractmethod
    def begin_profile(self) -> None:
        """Have every rank record its operators and its memory until `end_profile`."""

    @abstractmethod
    def end_profile(self, folder: str) -> None:
        """Have every rank write what it recorded into an existing folder, into files of its own."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every process; idempotent."""


class PolicyInterface(TrainedModel):
    """The policy. Its checkpoints hold the reference policy too once that has moved."""

    @abstractmethod
    def add_logprobs(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Add prev_logprobs to the batch: log-probabilities of every token under the current weights.

        Returns:
            [sequences], bool: whether the numbers at all sampled tokens are finite.
        """

    @abstractmethod
    def add_reference_logprobs(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Add reference_logprobs to the batch: log-probabilities of every token under the frozen reference policy.

        Returns:
            [sequences], bool: whether the numbers at all sampled tokens are finite.
        """

    @abstractmethod
    def sync_reference(self, alpha: float) -> None:
        """Move the reference policy: reference = alpha * policy + (1 - alpha) * reference (TR-DPO)."""


class ValueInterface(TrainedModel):
    """The value model of PPO; it trains on returns and the values before the step."""

    @abstractmethod
    def add_values(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Add values to the batch: what is expected before every token under the current weights; 0 at first tokens.

        Returns:
            [sequences], bool: whether the numbers at all sampled tokens are finite.
        """
