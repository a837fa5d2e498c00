"""The image processor of a model's folder, and a script's processor that has to equal it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem


@lru_cache(maxsize=4)
def load_image_processor(folder: Path) -> Any:
    """Load the image processor of a model's folder; ValueError: it has none."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} has no image processor that can be loaded: {reason}") from None


def require_own_processor(processor: Any, folder: Path) -> None:
    """ConfigError: a processor makes other pixels than that of the model's folder."""
    try:
        expected = load_image_processor(folder).to_dict()
    except ValueError as error:
        raise ConfigError([Problem("processor", str(error))]) from None
    settings = processor.image_processor.to_dict()
    different = [name for name in expected if name in settings and settings[name] != expected[name]]
    if different:
        values = ", ".join(f"{name}={settings[name]} instead of {expected[name]}" for name in different)
        text = f"has {values}, and ranks and engines use that of {folder}; save it there, or leave it out"
        raise ConfigError([Problem("processor", text)])
