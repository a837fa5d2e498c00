"""Llama 2 and 3: the layout that the other dense families build on."""

from __future__ import annotations

from megatron_grpo.models.weight_map import HFTensor, WeightEntry

EMBEDDING = HFTensor("model.embed_tokens.weight", ("vocab", "hidden"))

_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

INPUT = (WeightEntry(("embedding.word_embeddings.weight",), (EMBEDDING,), axis=0, merge="vocab"),)

ATTENTION = (
    WeightEntry(
        (_LAYER + "self_attention.linear_qkv.layer_norm_weight", _LAYER + "input_layernorm.weight"),
        (HFTensor(_HF + "input_layernorm.weight", ("hidden",)),),
        axis=None,
    ),
    WeightEntry(
        (_LAYER + "self_attention.linear_qkv.weight",),
        (
            HFTensor(_HF + "self_attn.q_proj.weight", ("heads", "hidden")),
            HFTensor(_HF + "self_attn.k_proj.weight", ("kv_heads", "hidden")),
            HFTensor(_HF + "self_attn.v_proj.weight", ("kv_heads", "hidden")),
        ),
        axis=0,
        merge="qkv",
    ),
    WeightEntry(
        (_LAYER + "self_attention.linear_proj.weight",),
        (HFTensor(_HF + "self_attn.o_proj.weight", ("hidden", "heads")),),
        axis=1,
    ),
)

MLP = (
    WeightEntry(
        (_LAYER + "mlp.linear_fc1.layer_norm_weight", _LAYER + "pre_mlp_layernorm.weight"),
        (HFTensor(_HF + "post_attention_layernorm.weight", ("hidden",)),),
        axis=None,
    ),
    WeightEntry(
        (_LAYER + "mlp.linear_fc1.weight",),
        (
            HFTensor(_HF + "mlp.gate_proj.weight", ("ffn", "hidden")),
            HFTensor(_HF + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        axis=0,
        merge="gate_up",
    ),
    WeightEntry(
        (_LAYER + "mlp.linear_fc2.weight",),
        (HFTensor(_HF + "mlp.down_proj.weight", ("hidden", "ffn")),),
        axis=1,
    ),
)

OUTPUT_NORM = (
    WeightEntry(("decoder.final_layernorm.weight",), (HFTensor("model.norm.weight", ("hidden",)),), axis=None),
)


def head(tied: bool) -> tuple[WeightEntry, ...]:
    """The output layer. Tied to the embedding it has weights of its own only on a last stage that is not the first."""
    tensor = EMBEDDING if tied else HFTensor("lm_head.weight", ("vocab", "hidden"))
    return (WeightEntry(("output_layer.weight",), (tensor,), axis=0, merge="vocab", copy=tied),)


def entries(tied: bool) -> tuple[WeightEntry, ...]:
    """The family's table."""
    return INPUT + ATTENTION + MLP + OUTPUT_NORM + head(tied)
