"""The value model as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.value.interface import ValueInterface
from megatron_grpo.policy.worker import ModelSettings
from megatron_grpo.policy.workers import MegatronWorkers


@dataclass(frozen=True, kw_only=True)
class ValueSettings(ModelSettings):
    """Of the value model."""

    def build_engine(self) -> Any:
        from megatron_grpo.policy.value.engine import ValueEngine

        return ValueEngine(self.config, self.shape, self.folder, decay_steps=self.decay_steps)


class MegatronValue(MegatronWorkers, ValueInterface):
    """The value model. Its settings are `ValueSettings`."""

    label = "value model"

    def get_values(self, batch: SequenceBatch) -> Tensor:
        return self._gather_tokens(batch, "values", "values")

    def per_token(self, batch: SequenceBatch) -> Tensor:
        return self.get_values(batch)
