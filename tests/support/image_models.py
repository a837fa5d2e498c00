"""Tiny models that see images in training, with their processors, and pictures."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLProcessor, Qwen3VLVideoProcessor

from megatron_grpo.models.source import COUNTING_VOCABULARY, PREPARED_MODELS
from megatron_grpo.prepare.counting import make_processor
from tests.support.hf_configs import read_configs

VOCAB = len(COUNTING_VOCABULARY)
COUNTING: dict[str, Any] = PREPARED_MODELS["counting"]
IMAGE_MODELS: dict[str, dict[str, Any]] = {"qwen2_5_vl": COUNTING, **read_configs("image_models")["models"]}
"""config.json of tiny models, by model_type; sizes that one lacks are those of the model that counts."""


def read_image_model(name: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a tiny model; `text`: entries of its text part."""
    raw = {**COUNTING, **IMAGE_MODELS[name]}
    layers = {} if name == "qwen2_5_vl" else {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
    base = {key: value for key, value in COUNTING["text_config"].items() if key != "rope_parameters"}
    return {**raw, "text_config": {**base, **layers, **raw["text_config"], **text}}


def make_image_model(folder: Path, seed: int = 0, name: str = "qwen2_5_vl", **text: Any) -> Any:
    """Save a random model with its processor; `text`: entries of its text part's config.json."""
    config = AutoConfig.for_model(**read_image_model(name, text))
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    if name == "qwen3_vl_moe":
        _turn_experts(folder / "model.safetensors")
    processor = make_processor()
    if name.startswith("qwen3"):
        sizes = {key: getattr(processor.image_processor, key) for key in ("patch_size", "merge_size", "size")}
        video = Qwen3VLVideoProcessor(**sizes, temporal_patch_size=2)
        parts = (processor.image_processor, processor.tokenizer, video)
        processor = Qwen3VLProcessor(*parts, chat_template=processor.chat_template)
    processor.save_pretrained(folder)
    return model


def _turn_experts(file: Path) -> None:
    """Store experts as released folders do, [experts, inputs, outputs], which transformers reads and does not write."""
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def draw_picture(rows: int, columns: int, seed: int = 0, form: str = "PNG") -> bytes:
    """Draw a random picture of this many tokens of the model, as a file's content."""
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * 8, columns * 8, 3), dtype=np.uint8)
    return save(Image.fromarray(pixels), form)


def save(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()
