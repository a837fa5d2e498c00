"""What the rest of the system knows of the value model: values, an optimizer step, a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.interface import LossFunction, TrainResult


class ValueInterface(ABC):
    """A value model spread over many processes that looks like one."""

    @abstractmethod
    def get_values(self, batch: SequenceBatch) -> Tensor:
        """The value before every token under the current weights: [sum(lengths)], float32; 0 at first tokens."""

    @abstractmethod
    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        """One optimizer step on the whole batch, whose tokens hold loss_mask, values and returns.

        Raises:
            NonFiniteGradientError: the weights are untouched.
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
