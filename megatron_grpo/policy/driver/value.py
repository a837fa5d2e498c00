"""The value model as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.batch import StepBatch
from megatron_grpo.policy.driver.rank_group import RankGroup
from megatron_grpo.policy.interface import ValueInterface
from megatron_grpo.policy.rank.actor import RankSettings


@dataclass(frozen=True, kw_only=True)
class ValueSettings(RankSettings):
    """What every rank of the value model is built from."""

    def build_rank(self) -> Any:
        from megatron_grpo.policy.rank.value_rank import ValueRank

        return ValueRank(self.config, self.shape, self.folder, decay_steps=self.decay_steps)


class MegatronValue(RankGroup, ValueInterface):
    """The value model. Its settings are `ValueSettings`."""

    label = "value model"
    output_method = "values"

    def add_values(self, batch: StepBatch) -> NDArray[np.bool_]:
        return self._add_entry(batch, "values", "values", "values")
