"""Tiny models that see images in training, with their processors, and pictures."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_grpo.models.source import COUNTING_VOCABULARY, PREPARED_MODELS
from megatron_grpo.prepare.counting import make_processor

VOCAB = len(COUNTING_VOCABULARY)


def make_image_model(folder: Path, seed: int = 0, **text: Any) -> Any:
    """Save a random Qwen2.5-VL with its processor; `text`: entries of its text part's config.json."""
    raw = PREPARED_MODELS["counting"]
    config = AutoConfig.for_model(**{**raw, "text_config": {**raw["text_config"], **text}})
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return model


def draw_picture(rows: int, columns: int, seed: int = 0, form: str = "PNG") -> bytes:
    """Draw a random picture of this many tokens of the model, as a file's content."""
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * 8, columns * 8, 3), dtype=np.uint8)
    return save(Image.fromarray(pixels), form)


def save(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()
