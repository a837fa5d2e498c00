"""config.json of released models in full size: those of tests/data/hf_configs, and their siblings of other sizes."""

from typing import Any

from tests.support.hf_configs import read_configs, read_released


def read_unquantized(name: str, **code: str) -> dict[str, Any]:
    """The file of a model converted to bfloat16, without its FP8 blocks; `code`: its auto_map."""
    fields = {key: value for key, value in read_released(name).items() if key != "quantization_config"}
    return fields | {"torch_dtype": "bfloat16", "auto_map": code}


def read_text_part(name: str, architecture: str) -> dict[str, Any]:
    """The language model of a model that sees images, by itself."""
    text: dict[str, Any] = read_released(name)["text_config"]
    return text | {"architectures": [architecture]}


def change_text(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The file of a model that sees images with other sizes of its language model."""
    return raw | {"text_config": raw["text_config"] | changes}


_SIBLINGS = read_configs("model_configs")
GLM_4_5_AIR = read_released("glm_4_5_air")
GLM_4_5 = GLM_4_5_AIR | _SIBLINGS["glm_4_5"]
GLM_4_9B = read_released("glm_4_9b_0414")
GLM_4_32B = GLM_4_9B | _SIBLINGS["glm_4_32b"]
_DEEPSEEK_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
MOONLIGHT = read_unquantized("moonlight_16b_a3b", **_DEEPSEEK_CODE)
KIMI_K2 = read_unquantized("kimi_k2", **_DEEPSEEK_CODE)
PHI_4 = read_released("phi_4")
PHI_4_MINI = (
    PHI_4
    | _SIBLINGS["phi_4_mini"]
    | {
        "rope_scaling": {
            "long_factor": [1.0 + number**2 / 50 for number in range(48)],
            "short_factor": [1.0] * 48,
            "type": "longrope",
        }
    }
)
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
SUPER = NANO | _SIBLINGS["nemotron_3_super"]
_EXPERTS = ("moe_", "n_routed", "n_shared", "num_experts", "norm_topk", "routed_scaling", "n_group", "topk_group")
NANO_9B = {key: value for key, value in NANO.items() if not key.startswith(_EXPERTS)} | _SIBLINGS["nemotron_nano_9b"]
"""Nemotron 3 Nano and Super, and Nemotron Nano 9B v2 without experts."""

GEMMA3_1B: dict[str, Any] = _SIBLINGS["gemma3_1b"]
LINEAR = {"rope_type": "linear", "factor": 8.0}


def in_the_new_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """The file of Gemma-3 1B as transformers 5 writes it."""
    fields = {key: value for key, value in raw.items() if "rope" not in key and key != "sliding_window_pattern"}
    everywhere = {"rope_type": "default", "rope_theta": 1e6, **(raw["rope_scaling"] or {})}
    return fields | {
        "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)],
        "rope_parameters": {
            "full_attention": everywhere,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
