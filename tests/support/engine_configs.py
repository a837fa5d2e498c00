"""config.json of a small model of each family, in sizes that vLLM's CPU kernels for attention accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 261,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA: dict[str, Any] = {
    **_SIZES,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 128,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
}
_SHARED_EXPERT: dict[str, Any] = {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 32}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}

ENGINE_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": _SIZES
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "tie_word_embeddings": True},
    "qwen3": _SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 4},
    "llama": _SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gemma3": _SIZES
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_local_base_freq": 10000.0,
    },
    "qwen3_moe": _SIZES
    | _EXPERTS
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "mixtral": _SIZES
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        **_SIZES,
        **_EXPERTS,
        "head_dim": 64,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
    },
    "qwen3_5": _DELTA | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "qwen3_5_vision": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": _DELTA | {"model_type": "qwen3_5_text"},
        "vision_config": _VISION | {"model_type": "qwen3_5_vision"},
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": _DELTA
    | _SHARED_EXPERT
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"},
    "qwen3_5_moe_vision": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": _DELTA | _SHARED_EXPERT | {"model_type": "qwen3_5_moe_text"},
        "vision_config": _VISION | {"model_type": "qwen3_5_moe_vision"},
        "tie_word_embeddings": False,
    },
    "qwen3_next": _DELTA
    | _SHARED_EXPERT
    | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "mlp_only_layers": [1]},
}
WITHOUT_TABLE = ("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision", "qwen3_next")
"""Families whose parameters in vLLM `engine_table` does not write out; loaders that run for real are their oracle."""


def write_engine_config(family: str, folder: Path) -> None:
    """Make a folder of a model without weights."""
    (folder / "config.json").write_text(json.dumps(ENGINE_CONFIGS[family]))
