"""The value model as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.driver.rank_group import RankGroup
from megatron_grpo.policy.interface import ValueInterface
from megatron_grpo.policy.rank.actor import RankSettings


@dataclass(frozen=True, kw_only=True)
class ValueSettings(RankSettings):
    """Of the value model."""

    def build_rank(self) -> Any:
        from megatron_grpo.policy.rank.value_rank import ValueRank

        return ValueRank(self.config, self.shape, self.folder, decay_steps=self.decay_steps)


class MegatronValue(RankGroup, ValueInterface):
    """The value model. Its settings are `ValueSettings`."""

    label = "value model"

    def get_values(self, batch: SequenceBatch) -> Tensor:
        return self._gather_tokens(batch, "values", "values")

    def per_token(self, batch: SequenceBatch) -> Tensor:
        return self.get_values(batch)
