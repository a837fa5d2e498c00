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
_GEMMA4: dict[str, Any] = {
    **_SIZES,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
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

_LATENT: dict[str, Any] = {
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
}
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 128}

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
    "deepseek_v3": _LATENT,
    "deepseek_v32": {
        **_LATENT,
        **_INDEXER,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
    },
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEXER,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_rope_interleave": True,
        "index_topk_pattern": "FFS",
        "indexer_types": ["full", "full", "shared"],
    },
    "glm4": _SIZES
    | {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe": _SIZES
    | _EXPERTS
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 1,
    },
    "phi3": _SIZES
    | {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 256,
        "model_type": "phi3",
        "original_max_position_embeddings": 256,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5] * 6, "long_factor": [4.0, 8.0] * 6},
        "partial_rotary_factor": 0.75,
        "pad_token_id": 0,
    },
    "olmo3": _SIZES
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_key_value_heads": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "minimax_m2": _SIZES
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "gpt_oss": _SIZES
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "llama4": _SIZES
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": 112,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 0],
        "attention_chunk_size": 128,  # a multiple of it, which vLLM's kernels for CPUs want
        "rope_theta": 500000.0,
    },
    "gemma4": _GEMMA4,
    "gemma4_moe": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "nemotron_h": {name: value for name, value in _SIZES.items() if name != "rms_norm_eps"}
    | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 4,
        "layer_norm_epsilon": 1e-5,
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
    "mistral": _SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "ministral3": _SIZES
    | {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "seed_oss": _SIZES | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True},
}
ENGINE_CONFIGS["nemotron_h_moe"] = ENGINE_CONFIGS["nemotron_h"] | {
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*E",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 40,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_VISION_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ministral3": ("Mistral3", "mistral3", {"model_type": "pixtral", "head_dim": 8}),
    "mistral": ("Mistral3", "mistral3", {"model_type": "pixtral", "head_dim": 8}),
    "gemma3": ("Gemma3", "gemma3", {"model_type": "siglip_vision_model"}),
    "gemma4": ("Gemma4", "gemma4", {"model_type": "gemma4_vision", "num_key_value_heads": 4, "head_dim": 8}),
    "gemma4_moe": ("Gemma4", "gemma4", {"model_type": "gemma4_vision", "num_key_value_heads": 4, "head_dim": 8}),
    "llama4": (
        "Llama4",
        "llama4",
        {
            "model_type": "llama4_vision_model",
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
        },
    ),
}
ENGINE_CONFIGS |= {
    f"{family}_vision": {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": {key: value for key, value in ENGINE_CONFIGS[family].items() if key != "architectures"},
        "vision_config": {**_TOWER, **tower},
        "tie_word_embeddings": ENGINE_CONFIGS[family]["tie_word_embeddings"],
    }
    for family, (name, model_type, tower) in _VISION_MODELS.items()
}
"""Families whose parameters in vLLM `engine_table` does not write out; loaders that run for real are their oracle."""


def write_engine_config(family: str, folder: Path) -> None:
    """Make a folder of a model without weights."""
    (folder / "config.json").write_text(json.dumps(ENGINE_CONFIGS[family]))
