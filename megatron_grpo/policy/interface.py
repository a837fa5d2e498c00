"""What the rest of the system knows of the policy: log-probabilities, an optimizer step, a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """What losses and metrics of one optimizer step are divided by, over all ranks and microbatches."""

    tokens: float
    """Tokens in the loss (sum of loss_mask)."""
    sequences: float
    """Sequences with at least one token in the loss."""


class LossFunction(Protocol):
    """A loss over one microbatch whose sum over all microbatches and ranks is the loss of the step."""

    def __call__(
        self, curr_logprobs: Tensor, tokens: dict[str, Tensor], counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """
        Args:
            curr_logprobs: [sequences, length], float32, with gradient; position t speaks of token t.
            tokens: entries of SequenceBatch.tokens, each [sequences, length], float32, zero on padding.
            counts: of the whole step.

        Returns:
            The microbatch's share of the loss (scalar) and of each metric (detached scalars). Shares add up to the
            step's value; a metric whose name ends in _max or _min is reduced by that instead.
        """


@dataclass(slots=True)
class TrainResult:
    """One optimizer step."""

    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    """From the loss function, reduced over all tokens of the step."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one rank knows of an optimizer step."""

    grad_norm: float
    learning_rate: float
    metrics: list[dict[str, float]] | None
    """Loss and metrics of each of its microbatches, on the reporting rank of each data-parallel replica."""


class PolicyInterface(ABC):
    """A model spread over many processes that looks like one."""

    @abstractmethod
    def get_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Log-probability of every token under the current weights: [sum(lengths)], float32."""

    @abstractmethod
    def get_reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        """The same under the frozen reference policy."""

    @abstractmethod
    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        """One optimizer step on the whole batch, split over data-parallel ranks and microbatches.

        `batch.tokens` holds loss_mask, advantages, generation_logprobs and, when the loss needs them, prev_logprobs and
        reference_logprobs.
        """

    @abstractmethod
    def save_checkpoint(self, folder: str) -> None:
        """Write weights, optimizer, schedule and random state to an existing, empty folder."""

    @abstractmethod
    def load_checkpoint(self, folder: str) -> None:
        """The inverse, also from a checkpoint of another layout."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every process; idempotent."""
