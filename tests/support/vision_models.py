"""Tiny models that see images and have a family's as their text part, saved by transformers."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from megatron_grpo.verification.problem import SMALL, TINY
from tests.support.hf_configs import read_configs

CONTAINERS: dict[str, dict[str, Any]] = read_configs("vision_models")["containers"]
"""model_type and further entries of the config.json of such a model, by the name of its text part's tiny model."""


def make_vision_model(name: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Save a random model to a folder, and return it."""
    text = {"model_type": name, **SMALL, **TINY[name], "pad_token_id": 0}  # Gemma 4 needs one
    if name == "mistral":
        text["tie_word_embeddings"] = True  # as its container is by default
    torch.manual_seed(seed)
    config = AutoConfig.for_model(text_config=text, **deepcopy(CONTAINERS[name]))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("scale"):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return model.eval()
