"""The transport that `refit.mode` names."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.refit.broadcast.transport import BroadcastTransport
from megatron_grpo.refit.files.transport import FilesTransport
from megatron_grpo.refit.interface import WeightTransport
from megatron_grpo.refit.reshard.transport import ReshardTransport


def transport_between(
    policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig, run_dir: Path
) -> WeightTransport:
    """The way of the policy's weights into generation, not yet connected.

    Args:
        policy: whose weights.
        generation: the engines that get them.
        config: which way.
        run_dir: the run's folder, which names the run's files where others have theirs.
    """
    if config.mode == "files":
        return FilesTransport(policy, generation, config, run_dir)
    transports = {"broadcast": BroadcastTransport, "reshard": ReshardTransport}
    return transports[config.mode](policy, generation, config)
