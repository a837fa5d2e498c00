"""Policies with adapters on ranks, without any package that only the development environment has."""

from typing import Any

from megatron_grpo.config.schema import LoraConfig, ReferenceConfig
from megatron_grpo.trainer.model.lora import AdaptedLinear
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.policy_training import make_engine
from tests.parity.ranks import Layout
from tests.support.tiny_models import TinyModel

LORA = LoraConfig(rank=3, alpha=7.0)
MATRICES = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
"""The matrices of transformers that each adapted layer of Megatron-Core's is made of."""


def make_lora_rank(layout: Layout, model: TinyModel, lora: LoraConfig = LORA, **settings: Any) -> PolicyRank:
    """A policy with adapters and a reference, its B as it begins: zero."""
    return make_engine(layout, model, lora=lora, reference=ReferenceConfig(), **settings)


def adapted_layers(rank: PolicyRank) -> dict[str, AdaptedLinear]:
    """The rank's adapted layers, by their name in the whole model."""
    return {
        f"{layer.layer_number - 1}.{name}": module
        for chunk in rank.chunks
        for layer in chunk.decoder.layers
        for name, module in layer.named_modules()
        if isinstance(module, AdaptedLinear)
    }
