"""The configuration of a mixture of experts, as its config.json has it."""

from __future__ import annotations

from typing import Any

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
