"""Tables of weights of released models that no family of the package has yet."""

from __future__ import annotations

from typing import cast

from megatron_grpo.models.families import gpt_oss
from megatron_grpo.models.families.llama import INPUT_NORM, MLP_NORM, QK_NORM
from megatron_grpo.models.shape import ExpertShape, LayerKind, ModelShape

PER_KEY, KEY_DIM, VALUE_DIM, KERNEL = 2, 3, 5, 4


class ComingShape(ModelShape):
    """Sizes with those of delta nets; every second layer has attention."""

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "per_group": self.attention_heads // self.key_value_heads,
            "key_heads": 4,
            "per_key": PER_KEY,
            "key_dim": KEY_DIM,
            "value_dim": VALUE_DIM,
            "kernel": KERNEL,
            "channel": 1,
        }

    def list_kinds(self, layer: int) -> frozenset[LayerKind]:
        return frozenset({"mixer", "mlp", "experts", "attention" if layer % 2 else cast(LayerKind, "delta")})


SHAPE = ComingShape(
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
    experts=ExpertShape(count=4, ffn_hidden=8, top_k=2, layers=(True, True), shared_ffn_hidden=8),
)

_QKV = "q * key_heads * key_dim | k * key_heads * key_dim | v * key_heads * per_key * value_dim"
_REST = "z * key_heads * per_key * value_dim | b * key_heads * per_key | a * key_heads * per_key"
_DELTA_REST = f"""
    delta: self_attention.conv1d.weight [{_QKV}, channel, kernel] = linear_attn.conv1d.weight
    delta: self_attention.dt_bias [key_heads * per_key] = linear_attn.dt_bias
    delta: self_attention.A_log [key_heads * per_key] = linear_attn.A_log
    delta: self_attention.out_norm.weight [value_dim] = linear_attn.norm.weight
    delta: self_attention.out_proj.weight [hidden, key_heads * per_key * value_dim] = linear_attn.out_proj.weight
"""
QWEN3_5_DELTA = f"""
    delta: self_attention.in_proj.weight [{_QKV} | {_REST}, hidden]
        = linear_attn.in_proj_qkv.weight [{_QKV}, hidden]
        + linear_attn.in_proj_z.weight [z * key_heads * per_key * value_dim, hidden]
        + linear_attn.in_proj_b.weight [b * key_heads * per_key, hidden]
        + linear_attn.in_proj_a.weight [a * key_heads * per_key, hidden]
    {_DELTA_REST}
"""
QWEN3_NEXT_DELTA = f"""
    delta: self_attention.in_proj.weight [{_QKV} | {_REST}, hidden]
        = linear_attn.in_proj_qkvz.weight
            [key_heads * (q * key_dim | k * key_dim | v * per_key * value_dim | z * per_key * value_dim), hidden]
        + linear_attn.in_proj_ba.weight [key_heads * (b * per_key | a * per_key), hidden]
    {_DELTA_REST}
"""
GATED_ATTENTION = """
    attention: self_attention.linear_qkv.weight
            [groups * (q * per_group * head_dim | gate * per_group * head_dim | key | value), hidden]
        = self_attn.q_proj.weight [groups * per_group * (q * head_dim | gate * head_dim), hidden]
        + self_attn.k_proj.weight [groups * key, hidden]
        + self_attn.v_proj.weight [groups * value, hidden]
    attention: self_attention.linear_proj.weight [hidden, groups * query] = self_attn.o_proj.weight
"""
PHI = """
    attention: self_attention.linear_qkv.weight [groups * (query | key | value), hidden]
        = self_attn.qkv_proj.weight [groups * query | groups * key | groups * value, hidden]
    dense: mlp.linear_fc1.weight [gate * ffn | up * ffn, hidden] = mlp.gate_up_proj.weight
"""
QWEN3_5_EXPERTS = """
    experts: mlp.router.weight [experts, hidden] = mlp.gate.weight
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.gate_up_proj [expert, gate * expert_ffn | up * expert_ffn, hidden]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.down_proj [expert, hidden, expert_ffn]
    experts: mlp.shared_experts.linear_fc1.weight [gate * shared_ffn | up * shared_ffn, hidden]
        = mlp.shared_expert.gate_proj.weight [gate * shared_ffn, hidden]
        + mlp.shared_expert.up_proj.weight [up * shared_ffn, hidden]
    experts: mlp.shared_experts.linear_fc2.weight [hidden, shared_ffn] = mlp.shared_expert.down_proj.weight
    experts: mlp.shared_experts.gate_weight [score, hidden] = mlp.shared_expert_gate.weight
"""
LLAMA4_EXPERTS = """
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = feed_forward.experts.gate_up_proj [expert, hidden, gate * expert_ffn | up * expert_ffn]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = feed_forward.experts.down_proj [expert, expert_ffn, hidden]
"""
GPT_OSS = gpt_oss.SINKS + gpt_oss.EXPERTS
QWEN3_NEXT = (INPUT_NORM, QWEN3_NEXT_DELTA, GATED_ATTENTION, QK_NORM, MLP_NORM, QWEN3_5_EXPERTS)
