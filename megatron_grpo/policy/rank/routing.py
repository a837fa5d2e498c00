"""What an optimizer step says about the experts of a model, and the biases that it moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.config.schema import MoeConfig
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.modeling.decoder import DecoderModel
from megatron_grpo.policy.modeling.experts import ExpertRouter, routers


class StepRouting:
    """The routers of a rank's shard, over one optimizer step after the other.

    Args:
        chunks: the rank's shard of a model with experts.
        config: how experts are kept in use.
        name: what names of metrics begin with.
        replays: whether tokens go through the experts that the engine chose.
    """

    def __init__(self, chunks: Sequence[DecoderModel], config: MoeConfig, name: str, *, replays: bool) -> None:
        self._name = name
        self.routers: list[ExpertRouter] = routers(chunks)
        self._replays = replays
        self._rate = config.bias_update_rate
        for router in self.routers:
            router.aux_loss_coeff, router.z_loss_coeff = config.aux_loss_coeff, config.z_loss_coeff
            router.replays = replays

    def begin(self, sequences: float) -> None:
        """A step begins, on so many sequences over all replicas."""
        for router in self.routers:
            router.clear()
            router.sequences_in_step = sequences

    @torch.no_grad()
    def move_biases(self, counts: Tensor) -> None:
        """Add the rate to the bias of every expert that was chosen less than the mean, and take it from the others.

        From DeepSeek-V3 (2024), section 2.1.2, without auxiliary loss.

        Args:
            counts: [layers of this rank, experts], float32, from `counts`.
        """
        if not self._rate:
            return
        for router, chosen in zip(self.routers, counts, strict=True):
            router.expert_bias.add_(self._rate * torch.sign(chosen.mean() - chosen))

    def counts(self) -> Tensor:
        """How many tokens of the step chose each expert; collective over the ranks of a pipeline stage.

        Returns:
            [layers of this rank, experts], float32, over all ranks that hold tokens.
        """
        device = current_platform().device
        rows = [router.chosen for router in self.routers if router.chosen is not None]
        assert len(rows) in (0, len(self.routers)), "every layer sees every token"
        experts = self.routers[0].num_experts if self.routers else 1
        counts = torch.stack(rows) if rows else torch.zeros(len(self.routers), experts, device=device)
        if self.routers:
            dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        return counts

    def metrics(self, counts: Tensor) -> dict[str, float]:
        """What the step tells about the experts, the same on every rank; collective over all ranks of the model.

        Args:
            counts: [layers of this rank, experts], float32, from `counts`.
        """
        level = counts * counts.shape[1] / counts.sum(dim=1, keepdim=True).clamp(min=1.0)
        nothing = counts.new_zeros(2)
        losses = torch.stack([r.losses for r in self.routers if r.losses is not None] or [nothing]).sum(0)
        agreement = torch.stack([r.agreement for r in self.routers if r.agreement is not None] or [nothing]).sum(0)
        over_tokens = torch.cat([losses, agreement])
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(over_tokens, group=stage)
        extremes = torch.stack([level.amax(dim=1).sum(), level.amin(dim=1).sum()])
        sums = torch.cat([extremes, over_tokens, losses.new_tensor([float(len(level))])])
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        highest, lowest, aux, z, agreed, compared, layers = sums.tolist()
        told = {
            f"{self._name}_load_highest": highest / layers,
            f"{self._name}_load_lowest": lowest / layers,
            f"{self._name}_aux_loss": aux,
            f"{self._name}_z_loss": z,
        }
        return told | ({"moe_routing_agreement": agreed / max(compared, 1.0)} if self._replays else {})
