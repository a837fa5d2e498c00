"""The models that recipes have made before the run: known before they exist, so that a layout can be checked."""

from __future__ import annotations

from typing import Any

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = {token: i for i, token in enumerate([*"0123456789+=", PAD, EOS, "<bos>", "<unk>"])}
"""Token ids of the models that add."""

CALL_BEGIN = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
CONVERSATION_VOCABULARY = {
    token: i for i, token in enumerate([*"0123456789+-*=,:", CALL_BEGIN, CALL_END, PAD, EOS, "<bos>", "<unk>"])
}
"""Token ids of the models that hold conversations."""

# Divisible by two along every axis.
_ADDITION: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    # Larger than usual for this width: weights of this size tolerate the steps of warm-up and run.
    "initializer_range": 0.06,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY[EOS],
    "pad_token_id": VOCABULARY[PAD],
    "dtype": "float32",
}

_CONVERSATION: dict[str, Any] = {
    **_ADDITION,
    "vocab_size": len(CONVERSATION_VOCABULARY),
    "eos_token_id": CONVERSATION_VOCABULARY[EOS],
    "pad_token_id": CONVERSATION_VOCABULARY[PAD],
}

PREPARED_MODELS: dict[str, dict[str, Any]] = {
    # 0.3 M parameters.
    "addition": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_ADDITION},
    # As large as the first.
    "calculator": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_CONVERSATION},
    "two_tasks": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_CONVERSATION},
    # 0.5 M parameters, of which a token meets as many as in the dense model: 2 experts, each half as wide as its MLP.
    "addition_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_ADDITION,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""config.json by prepare.name."""
