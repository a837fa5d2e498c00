"""Tiny models that see images and have a family's as their text part, saved by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from megatron_grpo.verification.problem import SMALL, TINY

_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
_PIXTRAL = {"vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8}}
CONTAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {"vision_config": _QWEN}),
    "qwen3_5_moe": ("qwen3_5_moe", {"vision_config": _QWEN}),
    "mistral": ("mistral3", _PIXTRAL),
    "ministral3": ("mistral3", {**_PIXTRAL, "tie_word_embeddings": False}),
    "gemma3": ("gemma3", {"vision_config": {**_TOWER, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4}),
    "gemma4": ("gemma4", {"vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8}, "audio_config": None}),
    "gemma4_moe": (
        "gemma4",
        {"vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8}, "audio_config": None},
    ),
    "llama4": (
        "llama4",
        {
            "vision_config": {
                **_TOWER,
                **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
            }
        },
    ),
}
"""model_type and further entries of the config.json of such a model, by the name of its text part's tiny model."""


def make_vision_model(name: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Save a random model to a folder, and return it."""
    model_type, entries = CONTAINERS[name]
    text = {"model_type": name, **SMALL, **TINY[name], "pad_token_id": 0}  # Gemma 4 needs one
    if name == "mistral":
        text["tie_word_embeddings"] = True  # as its container is by default
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, text_config=text, **entries)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("scale"):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return model.eval()
