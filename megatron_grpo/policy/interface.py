"""What the rest of the system knows of the policy: log-probabilities, an optimizer step, a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from megatron_grpo.config.schema import LossConfig
from megatron_grpo.data.sequences import SequenceBatch


@dataclass(slots=True)
class TrainResult:
    """One optimizer step."""

    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    """From the loss function, reduced over all tokens of the step."""


class PolicyInterface(ABC):
    """A model spread over many processes that looks like one."""

    @abstractmethod
    def get_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Log-probability of every token under the current weights: [sum(lengths)], float32."""

    @abstractmethod
    def get_reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        """The same under the frozen reference policy."""

    @abstractmethod
    def train(self, batch: SequenceBatch, loss: LossConfig) -> TrainResult:
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
