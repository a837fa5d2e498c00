"""The policy as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_grpo.config.schema import ReferenceConfig
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.driver.rank_group import RankGroup
from megatron_grpo.policy.interface import PolicyInterface
from megatron_grpo.policy.rank.actor import RankSettings


@dataclass(frozen=True, kw_only=True)
class PolicySettings(RankSettings):
    """Of the policy."""

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

    def get_logprobs(self, batch: SequenceBatch) -> Tensor:
        return self._gather_tokens(batch, "logprobs", "log-probabilities")

    def get_reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        return self._gather_tokens(batch, "reference_logprobs", "log-probabilities")

    def per_token(self, batch: SequenceBatch) -> Tensor:
        return self.get_logprobs(batch)

    def sync_reference(self, alpha: float) -> None:
        self._gather(self.submit(_sync_reference, alpha), "moving the reference policy")


def _sync_reference(engine: Any, alpha: float) -> None:
    """Move this rank's part of the reference policy; runs on every rank."""
    engine.sync_reference(alpha)
