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


def write_engine_config(family: str, folder: Path) -> None:
    """Make a folder of a model without weights."""
    (folder / "config.json").write_text(json.dumps(ENGINE_CONFIGS[family]))
