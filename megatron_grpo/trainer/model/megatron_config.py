"""Megatron-Core's configuration of a model: sizes, layout, speed, memory, FP8, and the fields that users pass on."""

from __future__ import annotations

import enum
import importlib.util
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.passthrough import check_library_fields
from megatron_grpo.config.schema import Fp8Config, ParallelConfig, PolicyConfig
from megatron_grpo.models.megatron_names import count_megatron_layers, list_by_megatron_layer
from megatron_grpo.models.shape import Activation, ModelShape
from megatron_grpo.platform.device import Platform, detect_platform
from megatron_grpo.trainer.model.attention import find_rope_factor
from megatron_grpo.trainer.model.layer_spec import needs_scaled_queries, uses_transformer_engine

T = TypeVar("T")


def square_positive(values: Tensor) -> Tensor:
    """Square of ReLU; Megatron-Core's own is compiled, also on a CPU."""
    return F.relu(values).square()


@dataclass
class DecoderSettings(TransformerConfig):
    """Megatron-Core's settings, which every module gets, and the modules' platform."""

    platform: Platform = field(default_factory=detect_platform)
    single_expert_has_weight_one: bool = False  # before scaling, rather than its score
    rotated_dim: int = 0  # features of a head that are rotated, its first
    rope_factor: float = 1.0  # of rotated queries and keys, where frequencies are scaled (YaRN, LongRoPE)
    recompute_latent_heads: bool = False
    """Whether latent attention makes queries, keys and values from short vectors again in the backward pass."""


def build_transformer_config(config: PolicyConfig, shape: ModelShape, platform: Platform) -> DecoderSettings:
    """Build Megatron-Core's settings of a decoder; fields that users pass override ours."""
    parallel, dtype = config.parallel, getattr(torch, config.precision)
    recomputes = config.activation_checkpointing
    uses_te = uses_transformer_engine(shape, platform, config.precision)
    ours: dict[str, Any] = dict(
        **_list_shape_settings(shape),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_list_delta_settings(shape),
        **_list_parallel_settings(parallel),
        bf16=config.precision == "bfloat16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        # Initialisation also marks which parameters are split over TP (without the marks, gradient norms leave the
        # other ranks' shards out), so it has to run, but it need not draw values that load_hf_weights overwrites.
        perform_initialization=True,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # The default dispatcher refuses variable_seq_lengths, even of a model without experts.
        moe_token_dispatcher_type="alltoall",
        **_list_expert_settings(shape, uses_te=uses_te),
        recompute_granularity="full" if recomputes else None,
        recompute_method="uniform" if recomputes else None,
        recompute_num_layers=count_megatron_layers(1) if recomputes else None,
        **_list_platform_settings(config, shape, platform, uses_te=uses_te),
        platform=platform,
        recompute_latent_heads="mla_up_proj" in config.recompute_modules,
    )
    return build_megatron_config(DecoderSettings, ours, build_transformer_fields(config, platform))


def _compute_quick_gelu(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.702 * gate)


_ACTIVATIONS: dict[Activation, dict[str, Any]] = {
    "silu": {"activation_func": F.silu},
    "gelu_tanh": {"activation_func": partial(F.gelu, approximate="tanh")},
    "relu2": {"activation_func": square_positive},
    "clamped_swiglu": {
        "activation_func": _compute_quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    },
}


def _list_shape_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": count_megatron_layers(shape.layers),
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn_hidden,
        "num_attention_heads": shape.attention_heads,
        "num_query_groups": shape.key_value_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "layernorm_zero_centered_gamma": shape.zero_centered_norms,
        # Megatron-Core has a place for a module behind the projection only with this setting.
        "qk_layernorm": shape.qk_norm or shape.full_width_qk_norm or needs_scaled_queries(shape),
        "attention_output_gate": shape.output_gate,
        "qk_l2_norm": shape.unweighted_qk_norm,
        "no_rope_freq": list_by_megatron_layer(shape.unrotated, "mixer") or None,
        "gated_linear_unit": shape.has_gates,
        **_ACTIVATIONS[shape.activation],
        "add_bias_linear": shape.attention_bias,  # of experts and routers too
        "add_qkv_bias": shape.qkv_bias,
        "softmax_scale": shape.softmax_scale,
        "rotary_interleaved": shape.interleaved_rope,
        "rotated_dim": shape.rotated_dim or shape.head_dim,
        "rope_factor": find_rope_factor(shape),
        "softmax_type": "learnable" if shape.sinks else "vanilla",
        # Megatron-Core counts tokens before and after the query's position, and lists which layers have the window.
        "window_size": None if shape.window is None else (shape.window - 1, 0),
        "window_attn_skip_freq": list_by_megatron_layer(shape.windowed, "mixer") or None,
        # Layers with other parameters than their neighbours, or of other sizes, cannot be stacked in a checkpoint.
        "hetereogenous_dist_checkpoint": bool(shape.single_halves) or shape.global_heads is not None,
    }


def _list_delta_settings(shape: ModelShape) -> dict[str, Any]:
    delta = shape.delta
    if delta is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": list_by_megatron_layer(shape.delta_layers, "mixer"),
        "linear_conv_kernel_dim": delta.kernel,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def find_passed_field_problems(sections: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Find passed fields that are unknown to Megatron-Core or of a wrong type."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    classes: dict[str, type] = {
        "policy.megatron": TransformerConfig,
        "policy.ddp": DistributedDataParallelConfig,
        "policy.megatron_optimizer": OptimizerConfig,
    }
    problems: list[Problem] = []
    for section, values in sections.items():
        settings = classes[section]
        subject = f"a field of Megatron-Core's {settings.__name__}"
        problems += check_library_fields(section, values, typing.get_type_hints(settings), subject)
    return problems


def build_transformer_fields(config: PolicyConfig, platform: Platform) -> dict[str, Any]:
    """Build TransformerConfig's fields for speed and memory, and the user's fields."""
    fuses = config.gradient_accumulation_fusion
    if fuses is None:
        # A rounded weight is a temporary without a gradient buffer to accumulate in. Otherwise apex's extension does.
        is_rounded = config.quantization is not None or config.fp8.is_simulated
        has_extension = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        fuses = platform.is_like_cuda and has_extension and not is_rounded
    fields: dict[str, Any] = {"gradient_accumulation_fusion": fuses}
    if config.deterministic:
        # Read by Transformer Engine, which refuses deterministic_mode without it.
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        # On a CPU results repeat anyway, and the flag would only choose a slower embedding.
        fields["deterministic_mode"] = platform.is_like_cuda
    if config.recompute_modules:
        # Megatron-Core knows mla_up_proj only of its own latent attention.
        modules = [module for module in config.recompute_modules if module != "mla_up_proj"]
        fields |= {"recompute_granularity": "selective", "recompute_modules": modules}
    return fields | config.megatron


def build_megatron_config(kind: type[T], ours: Mapping[str, Any], passed: Mapping[str, Any]) -> T:
    """Build a configuration of Megatron-Core; ValueError: it refuses the combination of fields."""
    # Passed fields, whose names and types were checked, override ours.
    hints = typing.get_type_hints(kind)
    try:
        return kind(**{**ours, **{name: _convert_value(hints[name], value) for name, value in passed.items()}})
    except (AssertionError, ValueError) as error:
        fields = ", ".join(f"{name}={value}" for name, value in passed.items())
        refusing = next(base.__name__ for base in kind.__mro__ if base.__module__.startswith("megatron.core."))
        raise ValueError(f"Megatron-Core refuses {refusing} with {fields}: {error}") from error


def _convert_value(hint: Any, value: Any) -> Any:
    members = typing.get_args(hint) or (hint,)
    if isinstance(value, str):  # users write dtypes and members of enumerations by name
        for member in members:
            if member is torch.dtype:
                return getattr(torch, value)
            if isinstance(member, type) and issubclass(member, enum.Enum):
                return member[value]
    if isinstance(value, list) and any(typing.get_origin(member) is tuple for member in (hint, *members)):
        return tuple(value)
    return value


def require_fp8(fp8: Fp8Config, shape: ModelShape, platform: Platform) -> None:
    """Raise a RunError if FP8 is configured and this GPU cannot compute it."""
    if not fp8.is_on_device:
        return
    setting = f"policy.fp8.format={fp8.format}"
    if not uses_transformer_engine(shape, platform):
        raise RunError(f"{setting} needs a GPU and Transformer Engine; policy.fp8.simulate=true imitates its numerics")
    if platform.name == "dry":
        return
    capability = torch.cuda.get_device_capability()
    if capability < fp8.least_capability:
        least, actual = (".".join(map(str, version)) for version in (fp8.least_capability, capability))
        name = torch.cuda.get_device_name()
        raise RunError(f"{setting}, recipe={fp8.recipe}: needs compute capability {least}, and {name} has {actual}")


def _list_parallel_settings(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers
        and count_megatron_layers(parallel.first_stage_layers),
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers
        and count_megatron_layers(parallel.last_stage_layers),
        "account_for_embedding_in_pipeline_split": parallel.count_embedding,
        "account_for_loss_in_pipeline_split": parallel.count_loss,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence and parallel.tensor > 1,
        # A stage's output was sent to the next stage, and only its node of the graph is needed until backward.
        "deallocate_pipeline_outputs": True,
    }


def _list_expert_settings(shape: ModelShape, *, uses_te: bool) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_hidden,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_latent_size": experts.latent,
        "moe_layer_freq": list_by_megatron_layer(experts.layers, "mlp"),
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.score,
        # Softmax over the chosen logits alone is softmax over all of them, scaled so that the chosen add up to one.
        # Megatron-Core refuses that for a single expert, and leaves the weight of a single sigmoid as it is.
        "moe_router_pre_softmax": experts.score == "softmax" and (not experts.normalised or experts.top_k == 1),
        "single_expert_has_weight_one": experts.normalised and experts.top_k == 1,
        "moe_router_topk_scaling_factor": experts.scaling if experts.scaling != 1.0 else None,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.top_groups if experts.groups > 1 else None,
        "moe_router_enable_expert_bias": experts.selection_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_apply_probs_on_input": experts.scales_input,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": uses_te,
        "moe_permute_fusion": uses_te,
    }


def _leave_as_is(weight: Tensor) -> None:
    pass


def _list_platform_settings(
    config: PolicyConfig, shape: ModelShape, platform: Platform, *, uses_te: bool
) -> dict[str, Any]:
    cuda, fp8 = platform.is_like_cuda, config.fp8
    settings: dict[str, Any] = {
        "apply_rope_fusion": uses_te,
        # Megatron-Core's fused functions have no GeLU by tanh, and clamp before they add a bias.
        "bias_activation_fusion": cuda and shape.activation == "silu",
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        # CUDA graphs are not used; the field's default value would log a warning of its deprecation.
        "cuda_graph_modules": [],
        "persist_layer_norm": False,
        # gloo has no batches of sends and receives; and of two interleaved stages, where both directions have one peer,
        # a batch mixes them up.
        "batch_p2p_comm": cuda and config.parallel.virtual_pipeline == 1,
        "batch_p2p_sync": False,  # torch needed it once
    }
    if fp8.is_on_device:
        settings |= {
            "fp8": fp8.format,
            "fp8_recipe": fp8.recipe,
            "fp8_param": fp8.parameters,
            "fp8_amax_history_len": fp8.amax_history,
            "fp8_amax_compute_algo": fp8.amax_algorithm,
            "first_last_layers_bf16": bool(fp8.first_layers_bf16 or fp8.last_layers_bf16),
            "num_layers_at_start_in_bf16": count_megatron_layers(fp8.first_layers_bf16),
            "num_layers_at_end_in_bf16": count_megatron_layers(fp8.last_layers_bf16),
        }
    return settings
