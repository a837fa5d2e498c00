"""Rotary settings of a config.json, which has several spellings, as transformers 5 and vLLM resolve them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.shape import read_number, read_section, read_size

# Keys that a rotary embedding with scaled frequencies needs, by rope_type.
_FACTORS = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Keys that vLLM reads and transformers' models of the supported families do not.
_VLLM_ONLY = ("rope_dim", "mrope_section", "use_fope")
# Names of the share of a head that is rotated; transformers knows the first.
_ROTATED = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")


def read_rotary(
    raw: Mapping[str, Any], rope_types: tuple[str, ...], default_theta: float, *, is_partial: bool = False
) -> tuple[float, dict[str, Any] | None]:
    """Read rope_theta and the settings that scale frequencies, if any.

    A rope_scaling that is not empty replaces all of rope_parameters. Its rope_theta comes before one beside it, but
    original_max_position_embeddings beside it comes before its own. `is_partial`: `read_rotated_dim` reads how much of
    a head is rotated.

    Raises:
        ValueError: a setting is missing or invalid, has no support, or is read in two ways.
    """
    rope = read_section(raw, "rope_scaling", "rope_parameters")
    rope_type = _read_rope_type(rope)
    nested = next((key for key, value in rope.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise ValueError(f"rope_parameters has settings by kind of layer ({nested}); only gemma3 has two kinds of them")
    for key in _VLLM_ONLY:
        if rope.get(key):
            raise ValueError(f"{key}={to_text(rope[key])} of the rotary embedding is not supported; remove it")
    if not is_partial:
        refuse_partial_rotation(rope)
    if rope_type not in rope_types:
        *first, last = rope_types
        supported = f"{', '.join(first)} and {last} are" if first else f"only {last} is"
        raise ValueError(f"rope_type={to_text(rope_type)} is not supported; {supported}")
    for key in _FACTORS.get(rope_type, ()):
        if rope.get(key) is None:
            raise ValueError(f"rope_type={rope_type} needs {key}")
        read_number(rope, key, 1.0)
    theta = _read_theta(rope if "rope_theta" in rope else raw, "rope_theta", default_theta)
    if rope_type == "default":
        return theta, None
    scaling = {key: value for key, value in rope.items() if key not in ("type", "rope_theta", *_ROTATED)}
    scaling["rope_type"] = rope_type
    if rope_type in ("llama3", "yarn", "longrope"):  # whose frequencies depend on the length of the first training
        holder = raw if _ORIGINAL_LENGTH in raw else rope if _ORIGINAL_LENGTH in rope else raw
        key = _ORIGINAL_LENGTH if _ORIGINAL_LENGTH in holder else "max_position_embeddings"
        scaling[_ORIGINAL_LENGTH] = read_size(holder, key)
    return theta, scaling


def read_rotary_by_kind(
    raw: Mapping[str, Any], local_kind: str, global_kind: str, default_theta: Mapping[str, float]
) -> tuple[float, dict[str, Any]]:
    """Read rope_theta of local layers and the rotary settings of global layers.

    The kinds are keys in rope_parameters. A rope_scaling replaces settings of global layers there key by key.
    ValueError as `read_rotary`.
    """
    by_kind = read_section(raw, "rope_parameters")
    if raw.get("rope_parameters") is not None and not {local_kind, global_kind} & by_kind.keys():
        raise ValueError(f"rope_parameters={to_text(dict(by_kind))} must have {local_kind} and {global_kind}")
    local_rope = read_section(by_kind, local_kind)
    refuse_partial_rotation(local_rope)
    local_type = _read_rope_type(local_rope)
    if local_type != "default":
        raise ValueError(f"rope_type={to_text(local_type)} of {local_kind} is not supported; only default is")
    scaling = read_section(raw, "rope_scaling")
    # transformers fills in the rope_type of rope_parameters first, so that a "type" of rope_scaling changes nothing.
    global_rope = {"rope_type": "default", **read_section(by_kind, global_kind), **scaling}
    _read_rope_type(global_rope)
    has_local_theta = "rope_theta" in local_rope
    local_source, key = (local_rope, "rope_theta") if has_local_theta else (raw, "rope_local_base_freq")
    local_theta = _read_theta(local_source, key, default_theta[local_kind])
    global_source = global_rope if "rope_theta" in global_rope else raw
    global_theta = _read_theta(global_source, "rope_theta", default_theta[global_kind])
    return local_theta, global_rope | {"rope_theta": global_theta}


def read_rotated_dim(raw: Mapping[str, Any], head_dim: int, default: float) -> int:
    """Count the features of a head that are rotated.

    `default`: share of the head if the file does not say it. ValueError: no even number of them, or read in two ways.
    """
    rope = read_section(raw, "rope_scaling", "rope_parameters")
    first, *aliases = _ROTATED
    for key in aliases:
        if key in raw or key in rope:
            raise ValueError(f"{key}={to_text(rope.get(key, raw.get(key)))} is not supported; write {first} instead")
    holder = rope if first in rope else raw
    if first in holder and holder[first] is None:
        raise ValueError(f"{first}=null is not supported; give the number, or leave the key out for {default}")
    factor = read_number(holder, first, default)
    rotated = int(head_dim * factor)  # rounded as in transformers and vLLM
    if factor > 1 or rotated % 2 or not rotated:
        raise ValueError(
            f"{first}={to_text(factor)} rotates {rotated} of the {head_dim} features of a head; "
            "it must be an even number of them, of 2 or more"
        )
    return rotated


def compute_yarn_scale(factor: float, weight: float) -> float:
    """Compute YaRN's attention scale for stretched positions (Peng et al. 2023, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def read_yarn_scale(rope: Mapping[str, Any], family: str) -> float:
    """Read the factor of rotated vectors; ValueError: vLLM takes another one."""
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            raise ValueError(
                f"{key}={to_text(rope[key])} of the rotary embedding is not supported for {family}: vLLM ignores it; "
                "remove it"
            )
    return compute_yarn_scale(read_number(rope, "factor", 1.0), 1.0)


def refuse_partial_rotation(raw: Mapping[str, Any]) -> None:
    """Refuse heads of which only a part is rotated: transformers and vLLM differ."""
    for key in _ROTATED:
        if raw.get(key) not in (None, 1):
            raise ValueError(f"{key}={to_text(raw[key])} is not supported; all of a head is rotated")


def split_partial_rotation(raw: Mapping[str, Any], default: float) -> tuple[dict[str, Any], float]:
    """Split a config.json into one without partial rotation, and the share.

    Settings of rotary embeddings come before a key beside them, and `default` is transformers' value without either.
    """
    key, rope_keys = "partial_rotary_factor", ("rope_scaling", "rope_parameters")
    rope = read_section(raw, *rope_keys)
    share = read_number(rope if key in rope else raw, key, default)
    if share > 1:
        raise ValueError(f"{key}={to_text(share)} must be at most 1")
    rest = {name: value for name, value in raw.items() if name not in (key, *rope_keys)}
    if rope:
        rest["rope_parameters"] = {name: value for name, value in rope.items() if name != key}
    return rest, share


def _read_rope_type(rope: Mapping[str, Any]) -> Any:
    values = [rope[key] for key in ("rope_type", "type") if key in rope]
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(
            f"rope_type={to_text(values[0])} and type={to_text(values[1])} of the rotary embedding differ; "
            "keep the one that is meant, as rope_type"
        )
    return values[0] if values else "default"


def _read_theta(raw: Mapping[str, Any], key: str, default: float) -> float:
    if key in raw and raw[key] is None:
        raise ValueError(f"{key}=null is not supported; give the number, or leave it out for {default}")
    return read_number(raw, key, default)
