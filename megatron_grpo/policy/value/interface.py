"""What the rest of the system knows of the value model, beside what is the same of every trained model."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.interface import TrainedModel


class ValueInterface(TrainedModel):
    """The value model; it trains on returns and the values before the step."""

    @abstractmethod
    def get_values(self, batch: SequenceBatch) -> Tensor:
        """The value before every token under the current weights: [sum(lengths)], float32; 0 at first tokens."""
