"""Tables of weights of released models that no family of the package has yet."""

from __future__ import annotations

from megatron_grpo.models.shape import DeltaShape, ExpertShape, ModelShape

PER_KEY, KEY_DIM, VALUE_DIM, KERNEL = 2, 3, 5, 4

SHAPE = ModelShape(
    family="coming",
    layers=2,
    hidden=6,
    ffn_hidden=8,
    attention_heads=8,
    key_value_heads=4,
    head_dim=3,
    vocab=13,
    tied_embeddings=False,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_positions=32,
    qkv_bias=False,
    qk_norm=True,
    experts=ExpertShape(count=4, ffn_hidden=8, top_k=2, layers=(True, True), shared_ffn_hidden=8, packed=True),
    delta=DeltaShape(key_heads=4, value_heads=4 * PER_KEY, key_dim=KEY_DIM, value_dim=VALUE_DIM, kernel=KERNEL),
    delta_layers=(True, False),
)

"""
GPT_OSS = """
    attention: self_attention.core_attention.softmax_offset [groups * per_group] = self_attn.sinks
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.gate_up_proj [expert, hidden, expert_ffn * (gate | up)]
    experts: mlp.experts.local_experts.{expert}.linear_fc1.bias [gate * expert_ffn | up * expert_ffn]
        = mlp.experts.gate_up_proj_bias [expert, expert_ffn * (gate | up)]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.down_proj [expert, expert_ffn, hidden]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.bias [hidden] = mlp.experts.down_proj_bias [expert, hidden]
"""
