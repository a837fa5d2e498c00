"""What config.json says of a vision model's images: their tokens, and the three-part positions of its text part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import ImageForm
from megatron_grpo.models.shape import ModelShape, read_section, read_size
from megatron_grpo.models.vision_shape import VisionShape

_ROPE = ("rope_scaling", "rope_parameters")
_SECTIONS, _TURNS, _LEVELS = "mrope_section", "mrope_interleaved", "deepstack_visual_indexes"
_MEDIA = ("vision_config", "text_config", "quantization_config", "compression_config")


def select_text_keys(raw: Mapping[str, Any], form: ImageForm) -> dict[str, Any]:
    """Select the keys of the text part, without the sections of its positions.

    Text has one position in time, height and width, so that the sections change nothing for it.
    """
    text = {**form.defaults, **{key: value for key, value in raw.items() if key not in _MEDIA}}
    rope = dict(read_section(text, *_ROPE))
    for key in (_SECTIONS, _TURNS):
        rope.pop(key, None)
    # transformers 4 calls embeddings with sections "mrope".
    is_old = {key for key in ("type", "rope_type") if rope.get(key) == "mrope"}
    plain = {**rope, **dict.fromkeys(is_old, "default")}
    text = {key: value for key, value in text.items() if key not in _ROPE}
    return text | ({"rope_parameters": plain} if plain else {})


def read_vision_shape(raw: Mapping[str, Any], form: ImageForm, shape: ModelShape) -> VisionShape:
    """Read how a model takes images; ValueError: a setting is missing or invalid."""
    settings = {**form.defaults, **raw}
    tokens = tuple(read_size(settings, key) for key in form.placeholders)
    if shape.experts is not None and not shape.experts.normalised:
        raise ValueError(
            "norm_topk_prob=false is not supported: transformers normalises weights of experts with images"
        )
    return VisionShape(
        image_token=tokens[0],
        placeholders=tokens,
        merge=read_size(read_section(raw, "vision_config"), "spatial_merge_size", 2),
        rotary_axes=_read_axes(read_section(read_section(raw, "text_config") or raw, *_ROPE), form, shape),
        levels=_count_levels(read_section(raw, "vision_config"), form, shape) if form.levels else 0,
    )


def _read_axes(rope: Mapping[str, Any], form: ImageForm, shape: ModelShape) -> tuple[int, ...]:
    """Read the part of a position that each frequency of a head turns by."""
    sections, takes_turns = rope.get(_SECTIONS, form.defaults[_SECTIONS]), rope.get(_TURNS, False)
    is_list = isinstance(sections, list | tuple) and len(sections) == 3 and all(type(part) is int for part in sections)
    if not is_list or sum(sections) != shape.head_dim // 2 or min(sections) < 0:
        rule = f"must be the frequencies of time, height and width, {shape.head_dim // 2} together"
        raise ValueError(f"{_SECTIONS}={to_text(sections)} {rule}, half of head_dim={shape.head_dim}")
    if takes_turns is not form.takes_turns:
        text = f"must be {to_text(form.takes_turns)}: vLLM goes by it, and transformers by the model's class"
        raise ValueError(f"{_TURNS}={to_text(takes_turns)} {text}")
    if not takes_turns:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    # Time, height, width and again; frequencies beyond the section of height or width turn by time.
    return tuple(number % 3 if number < 3 * sections[number % 3] else 0 for number in range(sum(sections)))


def _count_levels(vision: Mapping[str, Any], form: ImageForm, shape: ModelShape) -> int:
    """Count the layers that get further features of the tower."""
    levels, depth = vision.get(_LEVELS, form.levels), read_size(vision, "depth", 27)
    is_list = isinstance(levels, list | tuple) and all(type(level) is int and 0 <= level < depth for level in levels)
    if not is_list or list(levels) != sorted(set(levels)) or len(levels) > shape.layers:
        rule = f"must be rising numbers of the {depth} layers of the tower, at most {shape.layers} of them"
        raise ValueError(f"{_LEVELS}={to_text(levels)} {rule}")
    return len(levels)
