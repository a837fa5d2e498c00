"""The value model as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.megatron_policy import MegatronWorkers
from megatron_grpo.policy.value.interface import ValueInterface
from megatron_grpo.policy.worker import ModelSettings


@dataclass(frozen=True, kw_only=True)
class ValueSettings(ModelSettings):
    """Of the value model."""

    def build_engine(self) -> Any:
        from megatron_grpo.policy.value.engine import ValueEngine

        return ValueEngine(self.config, self.shape, self.folder, decay_steps=self.decay_steps)


class MegatronValue(MegatronWorkers, ValueInterface):
    """The value model: a model that says the value before each token.

    Args:
        settings: what every rank builds.
        actor_options: Ray options by rank.
        startup_timeout_s: deadline for all ranks to be up.
    """

    def __init__(
        self, settings: ValueSettings, actor_options: Callable[[int], dict[str, Any]], startup_timeout_s: float
    ) -> None:
        super().__init__(settings, actor_options, startup_timeout_s, called="value model")

    def get_values(self, batch: SequenceBatch) -> Tensor:
        return self._gather_tokens(batch, "values", "values")

    def of_tokens(self, batch: SequenceBatch) -> Tensor:
        return self.get_values(batch)
