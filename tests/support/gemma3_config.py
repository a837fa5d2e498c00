"""A Gemma-3 config.json, as transformers 4 and 5 write it."""

from __future__ import annotations

from typing import Any

OLD: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
"""As the released model of 1 B parameters has it, which transformers 4 wrote."""
LINEAR = {"rope_type": "linear", "factor": 8.0}


def in_the_new_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """The same as transformers 5 writes it."""
    kept = {key: value for key, value in raw.items() if "rope" not in key and key != "sliding_window_pattern"}
    everywhere = {"rope_type": "default", "rope_theta": 1e6, **(raw["rope_scaling"] or {})}
    return kept | {
        "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)],
        "rope_parameters": {
            "full_attention": everywhere,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
