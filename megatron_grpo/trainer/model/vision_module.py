"""Vision towers as transformers' modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def build_vision_module(folder: Path, dtype: torch.dtype) -> Any:
    """Build the vision part of a model's folder, weights uninitialised."""
    # Imported here because it takes seconds, and only models with images need it.
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        kind = type(AutoModelForImageTextToText.from_config(config).model.visual)
    return kind._from_config(config.vision_config, dtype=dtype, attn_implementation="sdpa")
