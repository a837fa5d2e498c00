"""What a transformer layer is built of: Transformer Engine on a GPU that has it, else Megatron-Core with torch."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_grpo.config.schema import Fp8Config, LoraConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.modeling.adapter import with_adapters
from megatron_grpo.policy.modeling.attention import TorchCoreAttention
from megatron_grpo.policy.modeling.fp8_rounding import with_rounding
from megatron_grpo.policy.modeling.norm import RMSNorm

logger = logging.getLogger(__name__)


@cache
def uses_transformer_engine() -> bool:
    """Whether layers come from Transformer Engine; says so once when a GPU has to do without it."""
    if current_platform().name == "cpu":
        return False
    found = importlib.util.find_spec("transformer_engine") is not None
    if not found:
        logger.warning("transformer_engine is not installed: layers fall back to plain torch, which is slower")
    return found


@dataclass(frozen=True, slots=True)
class Additions:
    """What linear layers of torch have besides their weights."""

    lora: LoraConfig
    fp8: Fp8Config

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self.lora.rank > 0 or self.fp8.simulated


def layer_spec(
    config: TransformerConfig, shape: ModelShape, vp_stage: int | None, additions: Additions
) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec that GPTModel builds the layers of this pipeline stage from, or of one of its chunks.

    With something in the linear layers, these and the norms are torch's also where Transformer Engine is: its own keep
    the norm before them inside, and with it the input that an adapter needs. The attention stays its own.
    """
    if uses_transformer_engine() and not additions:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = _transformer_engine_attention() if uses_transformer_engine() else TorchCoreAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    block = TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
    if additions.fp8.simulated:
        block = with_rounding(block, additions.fp8)
    return with_adapters(block, additions.lora) if additions.lora.rank else block


def _transformer_engine_attention() -> type:
    # Imported here because it can only be where Transformer Engine is.
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attention: type = TEDotProductAttention
    return attention
