"""Specs of transformer layers: Transformer Engine's modules where they are installed, else plain torch."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import Platform
from megatron_grpo.trainer.model.attention import LocalOrGlobalSelfAttention, TorchCoreAttention, compute_scaled_rope
from megatron_grpo.trainer.model.experts import DecoderLayer, ExpertRouter
from megatron_grpo.trainer.model.latent_attention import LatentAttention, LatentAttentionParts
from megatron_grpo.trainer.model.layers import NormedRowParallelLinear, RMSNorm, apply_mixin
from megatron_grpo.trainer.model.lora import AdaptedLinear
from megatron_grpo.trainer.model.rounding import QuantizedLinear, RoundedLinear

logger = logging.getLogger(__name__)


def uses_transformer_engine(
    shape: ModelShape, platform: Platform, precision: Literal["float32", "bfloat16"] = "bfloat16"
) -> bool:
    """True on a GPU with Transformer Engine, if it has the model's layers."""
    # No fused attention of Transformer Engine takes float32, its unfused one excludes context parallelism, and its
    # float32 products are rounded to TF32.
    if precision == "float32" or not _has_transformer_engine(platform.name):
        return False
    if not shape.fits_transformer_engine:
        _warn_of_family(shape.family)
        return False
    return True


@cache
def _warn_of_family(family: str) -> None:
    logger.warning("Transformer Engine has no layers for %s: they are plain torch, which is slower", family)


@cache
def _has_transformer_engine(platform: Literal["cuda", "cpu", "dry"]) -> bool:
    if platform != "cuda":
        return platform == "dry"  # a dry run assumes a GPU with Transformer Engine
    # The extension for torch, because the package transformer_engine may be installed without it.
    is_installed = importlib.util.find_spec("transformer_engine_torch") is not None
    if not is_installed:
        logger.warning("transformer_engine_torch is not installed: layers fall back to plain torch, which is slower")
    return is_installed


def build_layer_specs(
    settings: TransformerConfig, config: PolicyConfig, shape: ModelShape, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Build the layer specs of a pipeline stage or chunk."""
    te: TeParts | None = None
    if uses_transformer_engine(shape, settings.platform, config.precision):
        te = settings.platform.layer_parts
        if te is None:  # imported here because Transformer Engine may not be installed
            from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

            layer = partial(gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec, moe_grouped_gemm=True)
            te = TeParts(layer, TEDotProductAttention, TENorm)
    # With adapters, simulated FP8 or quantisation only attention is Transformer Engine's: its linear layers contain the
    # norm before them, which hides the input that an adapter needs.
    is_te_layer = te is not None and not (config.lora.rank or config.fp8.is_simulated or config.quantization)
    with_experts = dense = _build_layer(shape, None, te, is_te_layer=is_te_layer)
    if shape.experts is not None:
        with_experts = _build_layer(shape, shape.experts.count, te, is_te_layer=is_te_layer)
    first = get_transformer_layer_offset(settings, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(settings, vp_stage=vp_stage))
    specs = [with_experts if shape.has_experts(number) else dense for number in numbers]
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=te.norm if te and is_te_layer else RMSNorm)
    if config.fp8.is_simulated:
        assert config.fp8.recipe != "delayed", "its scales depend on earlier steps"
        apply_mixin(block, RoundedLinear, fp8=config.fp8)
    if config.quantization is not None:
        apply_mixin(block, QuantizedLinear, quantization=config.quantization)
    if config.lora.rank:
        apply_mixin(block, AdaptedLinear, names=config.lora.target_modules, lora=config.lora)
    return block


@dataclass(frozen=True, slots=True)
class TeParts:
    """Transformer Engine's modules, or in a dry run modules of shapes alone."""

    layer: Callable[..., ModuleSpec]
    """Builds a layer's spec from its number of experts (None: dense) and `qk_layernorm`: whether heads are normed."""
    attention: type
    norm: type


def _build_layer(shape: ModelShape, experts: int | None, te: TeParts | None, *, is_te_layer: bool) -> ModuleSpec:
    # `is_te_layer`: all of the layer is Transformer Engine's, rather than only its attention.
    if te is not None and is_te_layer:
        layer = te.layer(experts, qk_layernorm=shape.qk_norm)
    else:
        layer = _build_torch_layer(shape, experts, TorchCoreAttention if te is None else te.attention)
    if experts is not None:
        layer.module = DecoderLayer
        get_submodules(layer.submodules.mlp).router = ExpertRouter
        # In checkpoints the norm is not renamed, as in Transformer Engine's layers with experts.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    return layer


def _build_torch_layer(shape: ModelShape, experts: int | None, core_attention: type) -> ModuleSpec:
    layer = gpt_layer_specs.get_gpt_layer_local_spec(experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if shape.latent is not None:
        factor = 1.0 if shape.rope_scaling is None else compute_scaled_rope(shape)[1]
        sizes = {"latent": shape.latent, "softmax_scale": shape.softmax_scale, "rope_factor": factor}
        parts.self_attention = ModuleSpec(LatentAttention, params=sizes, submodules=LatentAttentionParts())
        return layer
    attention = parts.self_attention.submodules
    attention.core_attention = core_attention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if shape.post_norms:
        attention.linear_proj = get_submodules(parts.mlp).linear_fc2 = NormedRowParallelLinear
    if shape.local_rope_theta is not None:
        parts.self_attention.module = LocalOrGlobalSelfAttention
    return layer
