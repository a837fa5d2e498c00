"""Mistral, Ministral 3 (queries that grow with their position) and Seed-OSS: Llama's layers with other options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family, VisionModel
from megatron_grpo.models.families.llama import ATTENTION, INPUT_NORM, MLP, MLP_NORM, QKV_BIAS, read_dense
from megatron_grpo.models.families.options import WINDOW
from megatron_grpo.models.families.rotary import compute_yarn_scale
from megatron_grpo.models.shape import ModelShape, QueryScale, read_number

# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_SEED = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
_MINISTRAL = {**_MISTRAL, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
_ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_NULLABLE = ("head_dim", "num_key_value_heads")


def _read_mistral(raw: dict[str, Any]) -> ModelShape:
    if "sliding_window" not in raw:
        raise ValueError('has no sliding_window, for which transformers takes 4096; add "sliding_window": null')
    return read_dense(raw, "mistral", defaults=_MISTRAL, nullable=_NULLABLE, options={"sliding_window": (None,)})


def _read_seed_oss(raw: dict[str, Any]) -> ModelShape:
    options = {**WINDOW, "attention_bias": (True,), "attention_out_bias": (False,)}
    return read_dense(raw, "seed_oss", qkv_bias=True, defaults=_SEED, nullable=_NULLABLE, options=options)


def _read_ministral3(raw: dict[str, Any]) -> ModelShape:
    settings = raw if raw.get("rope_parameters") or raw.get("rope_scaling") else {**raw, "rope_parameters": _ROTARY}
    shape = read_dense(
        settings,
        "ministral3",
        rope_types=("yarn",),
        defaults=_MINISTRAL,
        options=WINDOW,
    )
    assert shape.rope_scaling is not None
    rope = {key: value for key, value in shape.rope_scaling.items() if value is not None}
    if rope.get("llama_4_scaling_beta") is None:
        raise ValueError(
            "the rotary embedding has no llama_4_scaling_beta, which transformers needs; add it, as in 0.1"
        )
    if rope.get("attention_factor") is not None or bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        advice = "give mscale and mscale_all_dim, or neither, without attention_factor"
        raise ValueError(
            f"attention_factor={to_text(rope.get('attention_factor'))} with mscale={to_text(rope.get('mscale'))} and "
            f"mscale_all_dim={to_text(rope.get('mscale_all_dim'))} is not supported; {advice}"
        )
    beta = read_number(rope, "llama_4_scaling_beta", 0.1)
    factor = read_number(rope, "factor", 1.0)
    scale = compute_yarn_scale(factor, read_number(rope, "mscale", 1.0))
    if rope.get("mscale_all_dim"):
        scale /= compute_yarn_scale(factor, read_number(rope, "mscale_all_dim", 1.0))
    own_keys = ("llama_4_scaling_beta", "max_position_embeddings")
    return replace(
        shape,
        rope_scaling={key: value for key, value in rope.items() if key not in own_keys},
        softmax_scale=shape.head_dim**-0.5 * scale**2,
        query_scale=QueryScale(slope=beta, length=int(rope["original_max_position_embeddings"])),
    )


_TABLES = (INPUT_NORM, ATTENTION, MLP_NORM, MLP)
# Of Mistral Small 3.1 and later, and of all Ministral 3.
_VISION = VisionModel(
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    parts=("vision_tower.", "multi_modal_projector."),
    text_prefix="language_model.",
    has_tied_head=True,
)
FAMILIES = (
    Family(name="mistral", architecture="MistralForCausalLM", read=_read_mistral, tables=_TABLES, vision=_VISION),
    Family(
        name="ministral3", architecture="Ministral3ForCausalLM", read=_read_ministral3, tables=_TABLES, vision=_VISION
    ),
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        read=_read_seed_oss,
        tables=(INPUT_NORM, ATTENTION, QKV_BIAS, MLP_NORM, MLP),
    ),
)
