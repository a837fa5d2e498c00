"""The model to verify: a folder or hub name, or a small random model of a family or of a given configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.weights.source import download_config, is_hub_name, local_folder, model_folder

_SETTINGS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("tiny_models.yaml").read_text())
SMALL, EXPERTS, LATENT, WINDOW, TINY = (
    _SETTINGS[name] for name in ("small", "experts", "latent", "window", "families")
)
"""Entries of config.json: of every small model, those of models with experts, latent attention or windows, and those of
families."""


def prepare_model(model: str, shrink: bool, folder: Path, seed: int) -> Path:
    """The folder of the model that is verified.

    Args:
        model: `tiny:` and a family, a folder with a config.json, or a hub name.
        shrink: make a small random model of the folder's own configuration.
        folder: folder to write a random model into.
        seed: seed of a random model's weights.

    Raises:
        ValueError: there is no such model.
        RunError: the model cannot be downloaded.
    """
    if model.startswith("tiny:"):
        family = model.removeprefix("tiny:")
        if family not in TINY:
            raise ValueError(f"model={model} is not known; use tiny: and one of {', '.join(TINY)}, or a folder")
        return _made({"model_type": family, **SMALL, **TINY[family]}, folder, seed)
    path = _folder_of(model, weights=not shrink)
    if not (path / "config.json").is_file():
        raise ValueError(f"model={model} has no config.json; give a model's folder, a hub name, or tiny: and a family")
    if not shrink:
        return path
    given = json.loads((path / "config.json").read_text())
    # Without these settings, transformers makes the weights in float32 and by its own code.
    raw = {name: value for name, value in given.items() if name not in ("quantization_config", "auto_map")}
    count = EXPERTS["num_local_experts"]
    small = {**SMALL, **EXPERTS, "num_experts": count, "n_routed_experts": count}
    small |= LATENT if "kv_lora_rank" in raw else {}
    sizes = {name: size for name, size in small.items() if name in raw or name in ("pad_token_id", "vocab_size")}
    sizes |= {name: size for name, size in WINDOW.items() if raw.get(name)}
    layers = raw.get("num_hidden_layers")
    per_layer = {
        # Every kind of layer once, then the kinds of the first layers.
        name: [*dict.fromkeys(value), *value][: SMALL["num_hidden_layers"]]
        for name, value in raw.items()
        if isinstance(value, list) and len(value) == layers
    }
    if raw.get("num_key_value_heads") == raw.get("num_attention_heads"):
        sizes["num_key_value_heads"] = SMALL["num_attention_heads"]
    return _made({**raw, **per_layer, **sizes}, folder, seed)


def _folder_of(model: str, *, weights: bool) -> Path:
    """The folder of a model, downloaded from the hub if necessary; without `weights` only its config.json."""
    if weights or not is_hub_name(model):
        return model_folder(model, "model")
    reason = download_config(model) if local_folder(model) is None else None
    folder = local_folder(model)
    if folder is None:
        raise ValueError(f"model={model} could not be downloaded: {reason}")
    return folder


def _made(config: dict[str, Any], folder: Path, seed: int) -> Path:
    """Write a model whose weights are all random, biases and norms (around their initial 1 or 0) included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder
