"""The transport that `refit.mode` names."""

from __future__ import annotations

from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.refit.broadcast.transport import BroadcastTransport
from megatron_grpo.refit.interface import WeightTransport
from megatron_grpo.refit.reshard.transport import ReshardTransport


def transport_between(policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig) -> WeightTransport:
    """The way of the policy's weights into generation, not yet connected."""
    transports = {"broadcast": BroadcastTransport, "reshard": ReshardTransport}
    return transports[config.mode](policy, generation, config)
