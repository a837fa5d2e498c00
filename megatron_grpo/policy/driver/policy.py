"""The policy as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import ReferenceConfig
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.policy.driver.rank_group import RankGroup
from megatron_grpo.policy.interface import PolicyInterface
from megatron_grpo.policy.rank.actor import RankSettings


@dataclass(frozen=True, kw_only=True)
class PolicySettings(RankSettings):
    """What every rank of the policy is built from."""

    reference: ReferenceConfig | None
    temperature: float

    def build_rank(self) -> Any:
        from megatron_grpo.policy.rank.policy_rank import PolicyRank

        return PolicyRank(
            self.config,
            self.shape,
            self.folder,
            reference=self.reference,
            temperature=self.temperature,
            decay_steps=self.decay_steps,
        )


class MegatronPolicy(RankGroup, PolicyInterface):
    """The policy. Its settings are `PolicySettings`."""

    label = "policy"
    output_method = "logprobs"

    def add_logprobs(self, batch: StepBatch) -> NDArray[np.bool_]:
        return self._add_entry(batch, "prev_logprobs", "logprobs", "log-probabilities")

    def add_reference_logprobs(self, batch: StepBatch) -> NDArray[np.bool_]:
        return self._add_entry(batch, "reference_logprobs", "reference_logprobs", "reference log-probabilities")

    def sync_reference(self, alpha: float) -> None:
        self._gather(self.submit(_sync_reference, alpha), "moving the reference policy")


def _sync_reference(rank: Any, alpha: float) -> None:
    """Move this rank's part of the reference policy; runs on every rank."""
    rank.sync_reference(alpha)
