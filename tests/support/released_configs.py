"""config.json of released models in full size: those of tests/data/hf_configs, and their siblings of other sizes."""

from __future__ import annotations

from typing import Any

from tests.support.hf_configs import read_released


def read_unquantized(name: str, **code: str) -> dict[str, Any]:
    """The file of a model converted to bfloat16, without its FP8 blocks; `code`: its auto_map."""
    kept = {key: value for key, value in read_released(name).items() if key != "quantization_config"}
    return kept | {"torch_dtype": "bfloat16", "auto_map": code}


def read_text_part(name: str, architecture: str) -> dict[str, Any]:
    """The language model of a model that sees images, by itself."""
    text: dict[str, Any] = read_released(name)["text_config"]
    return text | {"architectures": [architecture]}


def change_text(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The file of a model that sees images with other sizes of its language model."""
    return raw | {"text_config": raw["text_config"] | changes}


GLM_4_5_AIR = read_released("glm_4_5_air")
GLM_4_5 = GLM_4_5_AIR | {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
GLM_4_9B = read_released("glm_4_9b_0414")
GLM_4_32B = GLM_4_9B | {
    "attention_bias": False,
    "hidden_size": 6144,
    "intermediate_size": 23040,
    "num_attention_heads": 48,
    "num_hidden_layers": 61,
}
_DEEPSEEK_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
MOONLIGHT = read_unquantized("moonlight_16b_a3b", **_DEEPSEEK_CODE)
KIMI_K2 = read_unquantized("kimi_k2", **_DEEPSEEK_CODE)
PHI_4 = read_released("phi_4")
PHI_4_MINI = PHI_4 | {
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1.0 + number**2 / 50 for number in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
"""With other long factors."""
OLMO_3_7B = read_released("olmo_3_7b")
OLMO_3_32B = OLMO_3_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}
MINIMAX_M2 = read_unquantized(
    "minimax_m2",
    AutoConfig="configuration_minimax_m2.MiniMaxM2Config",
    AutoModelForCausalLM="modeling_minimax_m2.MiniMaxM2ForCausalLM",
)

BILLIONS: dict[str, tuple[dict[str, Any], float]] = {
    "GLM-4.5": (GLM_4_5, 352.8),
    "GLM-4.5-Air": (GLM_4_5_AIR, 106.85),
    "GLM-4-9B-0414": (GLM_4_9B, 9.40),
    "GLM-4-32B-0414": (GLM_4_32B, 32.57),
    "Moonlight-16B-A3B": (MOONLIGHT, 15.96),
    "Kimi-K2": (KIMI_K2, 1026.41),
    "Phi-4": (PHI_4, 14.66),
    "Phi-4-mini": (PHI_4_MINI, 3.836),
    "OLMo-3-7B": (OLMO_3_7B, 7.298),
    "OLMo-3-32B": (OLMO_3_32B, 32.23),
    "MiniMax-M2": (MINIMAX_M2, 228.7),
}
"""config.json and billions of parameters, without layers that predict further tokens, by name."""

LLAMA4_SCOUT = read_text_part("llama4_scout", "Llama4ForCausalLM")
LLAMA4_MAVERICK = LLAMA4_SCOUT | {
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "moe_layers": list(range(1, 48, 2)),
    "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}
GEMMA4_31B, GEMMA4_26B = (read_text_part(name, "Gemma4ForCausalLM") for name in ("gemma_4_31b", "gemma_4_26b_a4b"))

QWEN3_5_35B = read_released("qwen3_5_35b_a3b")
QWEN3_5_27B = change_text(
    read_released("qwen3_5_9b"),
    hidden_size=5120,
    intermediate_size=17408,
    layer_types=[*["linear_attention"] * 3, "full_attention"] * 16,
    linear_num_value_heads=48,
    num_attention_heads=24,
    num_hidden_layers=64,
)
QWEN3_NEXT_80B = read_released("qwen3_next_80b_a3b")
DELTA_NETS = {"qwen3_5": QWEN3_5_27B, "qwen3_5_moe": QWEN3_5_35B, "qwen3_next": QWEN3_NEXT_80B}
"""Models with gated delta nets by family."""

NANO = read_released("nvidia_nemotron_3_nano")
_SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = NANO | {
    "hidden_size": 4096,
    "hybrid_override_pattern": _SUPER_PATTERN,
    "intermediate_size": 5376,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": len(_SUPER_PATTERN),
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
}
_EXPERTS = ("moe_", "n_routed", "n_shared", "num_experts", "norm_topk", "routed_scaling", "n_group", "topk_group")
NANO_9B = {key: value for key, value in NANO.items() if not key.startswith(_EXPERTS)} | {
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "max_position_embeddings": 131072,
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "time_step_limit": [0.0, float("inf")],
}
"""Nemotron 3 Nano and Super, and Nemotron Nano 9B v2 without experts."""
