"""Sizes of a small model with delta nets, attention and stacked experts, for tests of weight tables."""

from typing import Any

from megatron_grpo.models.shape import DeltaShape, ExpertShape, ModelShape

PER_KEY, KEY_DIM, VALUE_DIM, KERNEL = 2, 3, 5, 4

SIZES: dict[str, Any] = {"hidden": 6, "attention_heads": 8, "key_value_heads": 4, "head_dim": 3, "vocab": 13}
SIZES |= {"norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "max_positions": 32, "tied_embeddings": False}
SHAPE = ModelShape(
    **SIZES,
    family="coming",
    layers=2,
    ffn_hidden=8,
    qkv_bias=False,
    qk_norm=True,
    experts=ExpertShape(count=4, ffn_hidden=8, top_k=2, layers=(True, True), shared_ffn_hidden=8, packed=True),
    delta=DeltaShape(key_heads=4, value_heads=4 * PER_KEY, key_dim=KEY_DIM, value_dim=VALUE_DIM, kernel=KERNEL),
    delta_layers=(True, False),
)
