"""What config.json says of a vision model's images: their tokens, and the three-part positions of its text part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import ImageForm
from megatron_grpo.models.shape import ModelShape, read_section, read_size
from megatron_grpo.models.vision_shape import VisionShape

_ROPE = ("rope_scaling", "rope_parameters")
_SECTIONS = "mrope_section"
_MEDIA = ("vision_config", "text_config", "quantization_config", "compression_config")


def select_text_keys(raw: Mapping[str, Any], form: ImageForm) -> dict[str, Any]:
    """Select the keys of the text part, without the sections of its positions.

    Text has one position in time, height and width, so that the sections change nothing for it.
    """
    text = {**form.defaults, **{key: value for key, value in raw.items() if key not in _MEDIA}}
    rope = dict(read_section(text, *_ROPE))
    rope.pop(_SECTIONS, None)
    # transformers 4 calls embeddings with sections "mrope".
    is_old = {key for key in ("type", "rope_type") if rope.get(key) == "mrope"}
    plain = {**rope, **dict.fromkeys(is_old, "default")}
    text = {key: value for key, value in text.items() if key not in _ROPE}
    return text | ({"rope_parameters": plain} if plain else {})


def read_vision_shape(raw: Mapping[str, Any], form: ImageForm, shape: ModelShape) -> VisionShape:
    """Read how a model takes images; ValueError: a setting is missing or invalid."""
    settings = {**form.defaults, **raw}
    tokens = tuple(read_size(settings, key) for key in form.placeholders)
    text = read_section(raw, "text_config") or raw
    sections = read_section(text, *_ROPE).get(_SECTIONS, form.defaults[_SECTIONS])
    is_list = isinstance(sections, list | tuple) and len(sections) == 3 and all(type(part) is int for part in sections)
    if not is_list or sum(sections) != shape.head_dim // 2 or min(sections) < 0:
        reason = f"must be the frequencies of time, height and width, {shape.head_dim // 2} together"
        raise ValueError(f"{_SECTIONS}={to_text(sections)} {reason}, half of head_dim={shape.head_dim}")
    return VisionShape(
        image_token=tokens[0],
        placeholders=tokens,
        merge=read_size(read_section(raw, "vision_config"), "spatial_merge_size", 2),
        rotary_axes=tuple(axis for axis, count in enumerate(sections) for _ in range(count)),
    )
