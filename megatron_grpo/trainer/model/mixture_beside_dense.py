"""Layers of Gemma 4: experts beside a dense feed-forward network, and a factor of each layer's output."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_grpo.trainer.model.experts import DecoderLayer, ExpertRouter
from megatron_grpo.trainer.model.layers import RMSNorm


class ScaledLayer(DecoderLayer):
    """A layer whose output is multiplied by an untrained number."""

    layer_scalar: Tensor

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        scalar = torch.ones(1, dtype=config.params_dtype, device=config.platform.device)
        self.register_buffer("layer_scalar", scalar)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        hidden, *rest = super().forward(*args, **keywords)
        return hidden * self.layer_scalar, *rest


class NormedRouter(ExpertRouter):
    """Normalises its input, and multiplies the weights of experts by trained factors."""

    def __init__(self, config: Any, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.norm = RMSNorm(config, config.hidden_size)
        options = {"dtype": config.params_dtype, "device": config.platform.device}
        factors: Any = torch.nn.Parameter(torch.empty(config.num_moe_experts, **options))
        factors.sequence_parallel = config.sequence_parallel
        self.per_expert_scale = factors

    def gating(self, input: Tensor) -> Tensor:
        """Compute logits: [..., hidden] to [..., experts], float32."""
        logits: Tensor = super().gating(self.norm(input) * input.shape[-1] ** -0.5)
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts, as `ExpertRouter.routing`."""
        probs, chosen = super().routing(logits, padding_mask)
        return probs * self.per_expert_scale, chosen


class MixtureBesideDense(MoELayer):
    """Experts beside a dense network, each with norms of its own.

    Both have the same input. The dense network is what Megatron-Core calls the shared expert. The router sees the input
    without a norm before it.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        self.dense_norm, self.dense_post_norm = RMSNorm(config, config.hidden_size), RMSNorm(config, config.hidden_size)
        self.expert_norm = RMSNorm(config, config.hidden_size)
        self.expert_post_norm = RMSNorm(config, config.hidden_size)
        self.post_norm = RMSNorm(config, config.hidden_size)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """Compute the dense network with its norms."""
        return self.dense_post_norm(super().shared_experts_compute(self.dense_norm(hidden_states)))

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Normalise the input of experts, and sort it by expert."""
        return super().preprocess(self.expert_norm(hidden_states), probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Add the normalised outputs of both, and normalise their sum."""
        routed = self.expert_post_norm(super().postprocess(output, None))
        return self.post_norm(routed + shared_expert_output)
