"""What a model's config.json says about its sizes: enough to check layouts, build the model and read its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["qwen3", "qwen2", "llama"]
FAMILY_OF_ARCHITECTURE: dict[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}

_REWARD_HEADS = ("ForSequenceClassification", "ForTokenClassification")
"""Ends of architectures whose output is a score."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder-only model, under one name each whatever the family calls them."""

    family: Family
    layers: int
    hidden: int
    ffn_hidden: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """HF's rope parameters when they scale the frequencies ("rope_type" other than "default"), else None."""
    max_positions: int
    qkv_bias: bool
    qk_norm: bool
    value_head: Literal["fresh", "stored"] | None = None
    """The output is one number a token instead of logits: a new head, or the one in the folder of a reward model."""

    @staticmethod
    def from_folder(path: str | Path, *, reward_models: bool = False) -> ModelShape:
        """Read `path`/config.json; reward models are refused unless they are asked for.

        Raises:
            ValueError: no such file, not JSON, or an architecture or option without support; the message says which.
        """
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text())
        except FileNotFoundError:
            raise ValueError(f"{file} does not exist; give a folder in Hugging Face format") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from None
        return ModelShape.from_hf_config(raw, reward_models=reward_models)

    @staticmethod
    def from_hf_config(raw: dict[str, Any], *, reward_models: bool = False) -> ModelShape:
        """From the contents of a config.json (transformers 4 and 5 spellings of the RoPE settings).

        Raises:
            ValueError: the architecture or one of its options has no support.
        """
        architecture = (raw.get("architectures") or ["(none)"])[0]
        scores = reward_models and architecture.endswith(_REWARD_HEADS)
        base = architecture.split("For")[0] + "ForCausalLM" if scores else architecture
        family = FAMILY_OF_ARCHITECTURE.get(base)
        if family is None:
            raise ValueError(
                f"architecture {architecture} is not supported; supported: {', '.join(FAMILY_OF_ARCHITECTURE)}"
            )
        if scores:
            _require_one_label(raw, architecture)
        _refuse_unsupported(raw, family)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        heads = int(raw["num_attention_heads"])
        return ModelShape(
            family=family,
            layers=int(raw["num_hidden_layers"]),
            hidden=int(raw["hidden_size"]),
            ffn_hidden=int(raw["intermediate_size"]),
            attention_heads=heads,
            key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            vocab=int(raw["vocab_size"]),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=None if rope_type == "default" else dict(rope),
            max_positions=int(raw.get("max_position_embeddings", 0)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            value_head="stored" if scores else None,
        )


def _require_one_label(raw: dict[str, Any], architecture: str) -> None:
    labels = raw.get("num_labels") or len(raw.get("id2label") or {}) or 2  # what transformers takes without either
    if labels != 1:
        raise ValueError(f"{architecture} with {labels} labels is a classifier; a reward model has 1")


def _refuse_unsupported(raw: dict[str, Any], family: Family) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']} is not supported; only silu is")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ValueError(f"{key}=true is not supported for {family}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "linear", "llama3"):
        raise ValueError(f"rope_type={rope_type} is not supported; default, linear and llama3 are")
