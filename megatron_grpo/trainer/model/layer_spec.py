"""Specs of transformer layers: Transformer Engine's modules where they are installed, else plain torch."""

from __future__ import annotations

import importlib.util
import logging
import sys
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal, override

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.megatron_names import map_checkpoint_names, translate_layer
from megatron_grpo.models.shape import LayerKind, ModelShape
from megatron_grpo.platform.device import Platform
from megatron_grpo.trainer.model.attention import (
    GrowingQueries,
    LocalOrGlobalSelfAttention,
    QueryKeyLinear,
    TorchCoreAttention,
    ValueNormSelfAttention,
    find_rope_factor,
)
from megatron_grpo.trainer.model.experts import (
    DecoderLayer,
    ExpertRouter,
    LatentExperts,
    MixtureBesideDense,
    NormedRouter,
    ScaledLayer,
    build_shared_experts,
)
from megatron_grpo.trainer.model.image_layer import ImageLayer
from megatron_grpo.trainer.model.latent_attention import LatentAttention, LatentAttentionParts, ReplicatedLinear
from megatron_grpo.trainer.model.layers import (
    ExpertRowParallelLinear,
    HeadNorm,
    KeyNorm,
    NormedRowParallelLinear,
    QueryNorm,
    RMSNorm,
    ScaledQuery,
    UnweightedNorm,
    apply_mixin,
)
from megatron_grpo.trainer.model.lora import AdaptedGroupedLinear, AdaptedLinear
from megatron_grpo.trainer.model.mamba import MambaMixer, MambaParts
from megatron_grpo.trainer.model.rounding import QuantizedLinear, RoundedLinear
from megatron_grpo.trainer.model.sparse_attention import SparseCoreAttention

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
    # Importing the package loads its extension for torch, which its wheel keeps in a folder off Python's path. There
    # may be the package without the extension.
    with suppress(ImportError):
        importlib.import_module("transformer_engine")
    is_installed = importlib.util.find_spec("transformer_engine_torch") is not None
    if not is_installed:
        logger.warning("transformer_engine_torch is not installed: layers fall back to plain torch, which is slower")
    return is_installed


@cache
def warn_of_unfused_attention() -> None:
    """Warn if Transformer Engine has no fused kernel for this model's attention.

    It then keeps all scores of a sequence, and says so only where NVTE_DEBUG is set. Called after a run's first pass,
    in which it chooses: that of log-probabilities, which keeps the scores of one layer only.
    """
    package = "transformer_engine.pytorch.attention.dot_product_attention"
    attention = sys.modules.get(f"{package}.dot_product_attention")
    if attention is not None and attention._attention_backends["use_unfused_attention"]:
        text = "Transformer Engine attends without a fused kernel: memory grows with the square of a sequence's length"
        logger.warning("%s. Often another cuDNN is loaded than torch's; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 say why", text)


def build_layer_specs(
    settings: TransformerConfig, config: PolicyConfig, shape: ModelShape, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Build the layer specs of a pipeline stage or chunk."""
    modules: BackendSpecProvider = TorchModules()
    if uses_transformer_engine(shape, settings.platform, config.precision):
        te = settings.platform.layer_modules
        if te is None:  # imported here because Transformer Engine may not be installed
            from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

            te = TESpecProvider()
        # With adapters only attention and experts are Transformer Engine's, with simulated FP8 or quantisation only
        # attention: its other linear layers contain the norm before them, which hides the input that an adapter needs.
        changes_experts = config.fp8.is_simulated or config.quantization
        if config.lora.rank or changes_experts:
            modules = TorchModules(te.core_attention(), None if changes_experts else te)
        else:
            modules = te
    first = get_transformer_layer_offset(settings, vp_stage=vp_stage) + 1
    numbers = range(first, first + get_num_layers_to_build(settings, vp_stage=vp_stage))
    kinds = [shape.list_kinds(translate_layer(number)[0]) for number in numbers]
    specs = {layer_kinds: _build_layer(shape, layer_kinds, modules) for layer_kinds in set(kinds)}
    layers = [specs[layer_kinds] for layer_kinds in kinds]
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.layer_norm(rms_norm=True))
    if config.fp8.is_simulated:
        assert config.fp8.recipe != "delayed", "its scales depend on earlier steps"
        apply_mixin(block, RoundedLinear, fp8=config.fp8)
    if config.quantization is not None:
        apply_mixin(block, QuantizedLinear, quantization=config.quantization)
    if config.lora.rank:
        targets = config.lora.target_modules
        apply_mixin(block, AdaptedLinear, names=targets, grouped=AdaptedGroupedLinear, lora=config.lora)
    return block


class TorchModules(LocalSpecProvider):
    """Modules that layers are made of, in plain torch.

    `experts`: the provider of the experts' modules; None: these are in plain torch too.
    """

    def __init__(self, core_attention: type = TorchCoreAttention, experts: BackendSpecProvider | None = None) -> None:
        self._core_attention, self._experts = core_attention, experts

    @override
    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        if self._experts is None:
            return super().grouped_mlp_modules(moe_use_grouped_gemm)
        return self._experts.grouped_mlp_modules(moe_use_grouped_gemm)

    @override
    def linear(self) -> type:
        return ReplicatedLinear

    @override
    def core_attention(self) -> type:
        return self._core_attention

    @override
    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm


def _build_layer(shape: ModelShape, kinds: frozenset[LayerKind], modules: BackendSpecProvider) -> ModuleSpec:
    # The two halves are apart, as a hybrid stack takes them: there each is a layer.
    has_experts, is_fused = "experts" in kinds, modules.fuse_layernorm_and_linear()
    names = map_checkpoint_names(
        is_fused=is_fused,
        is_latent="latent" in kinds,
        has_experts=has_experts,
        has_in_proj=bool({"delta", "mamba"} & kinds),
    )
    # A layer without one of the halves has no modules in its place, and passes its input on.
    halves = build_mixer(shape, kinds, modules) if "mixer" in kinds else {}
    halves |= build_mlp(shape, kinds, modules) if "mlp" in kinds else {}
    parts = TransformerLayerSubmodules(**halves, sharded_state_dict_keys_map=names)
    layer = DecoderLayer if has_experts else TransformerLayer
    layer = ScaledLayer if shape.layer_scale else layer
    return ModuleSpec(ImageLayer if "image_features" in kinds else layer, submodules=parts)


def build_mixer(shape: ModelShape, kinds: frozenset[LayerKind], modules: BackendSpecProvider) -> dict[str, Any]:
    """Build a layer's attention and the norm before it: fields of its spec."""
    fused = None
    if "latent" in kinds:
        attention = _build_latent_attention(shape, modules)
    elif "delta" in kinds:
        fused = modules.column_parallel_layer_norm_linear()
        attention = _build_delta_net(fused or modules.column_parallel_linear(), modules)
    elif "mamba" in kinds:
        fused = modules.column_parallel_layer_norm_linear()
        linears = MambaParts(fused or modules.column_parallel_linear(), modules.row_parallel_linear())
        attention = ModuleSpec(MambaMixer, params={"sizes": shape.mamba}, submodules=linears)
    else:
        fused = modules.column_parallel_layer_norm_linear()
        query_norm, key_norm = _choose_head_norms(shape, modules)
        core_attention = modules.core_attention()
        if shape.unweighted_qk_norm and "unrotated" not in kinds:
            query_norm = key_norm = UnweightedNorm  # before the rotation instead of behind it, which changes no length
        if shape.query_scale is not None and ("unrotated" in kinds or not shape.unrotated):
            names = {"scale": shape.query_scale}
            core_attention = type(f"Growing{core_attention.__name__}", (GrowingQueries, core_attention), names)
        parts = SelfAttentionSubmodules(
            linear_qkv=QueryKeyLinear if "key_as_value" in kinds else fused or modules.column_parallel_linear(),
            core_attention=core_attention,
            linear_proj=NormedRowParallelLinear if shape.post_norms else modules.row_parallel_linear(),
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        )
        module = SelfAttention if shape.local_rope_theta is None else LocalOrGlobalSelfAttention
        params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
        if shape.value_norm:
            module, params["heads"] = ValueNormSelfAttention, shape.global_heads if "global" in kinds else None
        attention = ModuleSpec(module, params=params, submodules=parts)
    return {
        "input_layernorm": modules.layer_norm(rms_norm=True) if fused is None and shape.pre_norms else IdentityOp,
        "self_attention": attention,
        "self_attn_bda": get_bias_dropout_add,
    }


def needs_scaled_queries(shape: ModelShape) -> bool:
    """Whether a factor of rotated vectors is applied to queries."""
    # Elsewhere it is part of the softmax scale, or of multi-latent attention or layers with two rotary embeddings.
    is_elsewhere = shape.softmax_scale is not None or shape.latent is not None or shape.local_rope_theta is not None
    has_factor = not is_elsewhere and find_rope_factor(shape) != 1.0
    assert not has_factor or not (shape.qk_norm or shape.full_width_qk_norm), "one module behind the projection"
    return has_factor


def _choose_head_norms(shape: ModelShape, modules: BackendSpecProvider) -> tuple[type, type]:
    """Choose the modules behind the projections to queries and to keys."""
    if shape.full_width_qk_norm:
        return QueryNorm, KeyNorm
    if shape.qk_norm:
        head_norm = modules.layer_norm(rms_norm=True, for_qk=True)
        return head_norm, head_norm
    return ScaledQuery if needs_scaled_queries(shape) else IdentityOp, IdentityOp


def _build_latent_attention(shape: ModelShape, modules: BackendSpecProvider) -> ModuleSpec:
    sizes = {
        "latent": shape.latent,
        "softmax_scale": shape.softmax_scale,
        "rope_factor": find_rope_factor(shape),
        "indexer": shape.indexer,
    }
    # An indexer reads the normalised short query too, so the norm is a module of its own.
    normed = modules.column_parallel_layer_norm_linear() if shape.indexer is None else None
    parts = LatentAttentionParts(
        replicated=modules.linear(),
        column=modules.column_parallel_linear(),
        norm=modules.layer_norm(rms_norm=True) if normed is None else IdentityOp,
        normed_column=normed or modules.column_parallel_linear(),
        core_attention=modules.core_attention() if shape.indexer is None else SparseCoreAttention,
        linear_proj=modules.row_parallel_linear(),
    )
    return ModuleSpec(LatentAttention, params=sizes, submodules=parts)


def _build_delta_net(in_proj: Any, modules: BackendSpecProvider) -> ModuleSpec:
    # Imported here because only some models have delta nets.
    from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules

    from megatron_grpo.trainer.model.delta_net import DeltaNet

    out_proj = modules.row_parallel_linear()
    return ModuleSpec(DeltaNet, submodules=GatedDeltaNetSubmodules(in_proj, HeadNorm, out_proj))


def build_mlp(shape: ModelShape, kinds: frozenset[LayerKind], modules: BackendSpecProvider) -> dict[str, Any]:
    """Build a layer's feed-forward network and the norm before it: fields of its spec."""
    if "experts" in kinds:
        assert shape.experts is not None
        mlp = get_moe_module_spec_for_backend(modules, shape.experts.count, moe_grouped_gemm=True)
        get_submodules(mlp).router = ExpertRouter
        shared = get_submodules(mlp).shared_experts
        get_submodules(mlp).shared_experts = partial(build_shared_experts, build=shared.func, **shared.keywords)
        matrices = get_submodules(get_submodules(mlp).experts)
        if shape.experts.bias and matrices.linear_fc2 is RowParallelLinear:
            matrices.linear_fc2 = ExpertRowParallelLinear
        if shape.experts.beside_dense:
            get_submodules(mlp).router = NormedRouter
            mlp = partial(MixtureBesideDense, submodules=get_submodules(mlp))
            return {"pre_mlp_layernorm": IdentityOp, "mlp": mlp, "mlp_bda": get_bias_dropout_add}
        if "latent_experts" in kinds:
            mlp = partial(LatentExperts, submodules=get_submodules(mlp))
    else:
        fc1 = modules.column_parallel_layer_norm_linear() or modules.column_parallel_linear()
        fc2 = NormedRowParallelLinear if shape.post_norms else modules.row_parallel_linear()
        mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    is_fused = modules.fuse_layernorm_and_linear() and "experts" not in kinds
    has_norm = shape.pre_norms and not is_fused
    return {
        "pre_mlp_layernorm": IdentityOp if not has_norm else modules.layer_norm(rms_norm=True, has_residual=True),
        "mlp": mlp,
        "mlp_bda": get_bias_dropout_add,
    }
