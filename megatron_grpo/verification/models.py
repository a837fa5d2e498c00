"""The model that is verified: a folder, or a small random one, of a family or of another's configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_grpo.verification.request import UsageError

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a small model; the vocabulary is odd, so that it has to be padded in every tensor-parallel layout."""

SMALL_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
"""Sizes of a small mixture of experts."""

TINY: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **SMALL_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "mixtral": lambda: MixtralConfig(**SMALL, **SMALL_EXPERTS, sliding_window=None),
}
"""Configurations of small models, by family; of qwen3_moe one layer has no experts."""


def prepare_model(model: str, shrink: bool, folder: Path, seed: int) -> Path:
    """The folder of the model that is verified.

    Args:
        model: `tiny:` and a family, or a folder with a config.json.
        shrink: make a small random model of the folder's own configuration.
        folder: where a model is made.
        seed: of its weights.

    Raises:
        UsageError: there is no such model.
    """
    if model.startswith("tiny:"):
        family = model.removeprefix("tiny:")
        if family not in TINY:
            raise UsageError(f"model={model} is not known; use tiny: and one of {', '.join(TINY)}, or a folder")
        return _made(TINY[family](), folder, seed)
    path = Path(model)
    if not (path / "config.json").is_file():
        raise UsageError(f"model={model} has no config.json; give a model's folder, or tiny: and a family")
    if not shrink:
        return path
    raw = json.loads((path / "config.json").read_text())
    small = {**SMALL, **SMALL_EXPERTS, "num_experts": SMALL_EXPERTS["num_local_experts"]}
    sizes = {name: size for name, size in small.items() if name in raw or name in ("pad_token_id", "vocab_size")}
    layers = raw.get("num_hidden_layers")
    per_layer = {
        name: value[: SMALL["num_hidden_layers"]]
        for name, value in raw.items()
        if isinstance(value, list) and len(value) == layers
    }
    if raw.get("num_key_value_heads") == raw.get("num_attention_heads"):
        sizes["num_key_value_heads"] = SMALL["num_attention_heads"]
    return _made(AutoConfig.for_model(**{**raw, **per_layer, **sizes}), folder, seed)


def _made(config: PretrainedConfig, folder: Path, seed: int) -> Path:
    """A model with every weight random, norms and biases included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder
