"""Names and numbers of Megatron-Core's layers, which no other file knows.

Hugging Face numbers layers from 0; Megatron-Core from 1 in the model (`layer_number`), and from 0 in a stage or chunk.
The constants are those of GPTModel. HybridModel has a layer for each half, `(("mixer",), ("mlp",))`, and `final_norm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

Half = Literal["mixer", "mlp"]
"""Half of a Hugging Face layer: attention or what stands in its place, or the feed-forward network."""

HALVES: tuple[tuple[Half, ...], ...] = (("mixer", "mlp"),)
"""Halves in each of the layers of Megatron-Core that make up a Hugging Face layer."""
FINAL_NORM = "final_layernorm"
TOWER = "vision_tower."
"""Beginning of the names of a vision tower that is trained; the first pipeline stage has it."""

# Transformer Engine fuses a norm with the product behind it, of attention, a delta net or Mamba, and has the matrices
# of experts in one module.
_INPUT_NORM, _STATE_NORM, _MLP_NORM, _QUERY_NORM, _KEY_VALUE_NORM = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("input_layernorm.", "self_attention.in_proj.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
_FUSED_NORMS = (_INPUT_NORM, _STATE_NORM, _MLP_NORM, _QUERY_NORM, _KEY_VALUE_NORM)
_ENGINE_NAMES: dict[str, tuple[str, ...]] = {
    **{
        f"{name}weight": tuple(f"{fused}weight" for norm, fused in _FUSED_NORMS if norm == name)
        for name, _ in _FUSED_NORMS
    },
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": ("mlp.experts.linear_fc1.weight{expert}",),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": ("mlp.experts.linear_fc2.weight{expert}",),
    "mlp.experts.local_experts.{expert}.linear_fc1.bias": ("mlp.experts.linear_fc1.bias{expert}",),
    "mlp.experts.local_experts.{expert}.linear_fc2.bias": ("mlp.experts.linear_fc2.bias{expert}",),
}


def name_parameter(layer: int, half: Half | None, name: str) -> tuple[str, ...]:
    """Name a parameter in the torch layers and, where they differ, in Transformer Engine's.

    Args:
        layer: Hugging Face's number, less that of the first layer of the stage for names in a stage.
        half: the half of the layer that has the parameter; None: the parameter is outside layers.
        name: the parameter's name in Megatron-Core's layer or, outside layers, in the model, where the final norm is
            "final_norm".
    """
    if half is None:
        return (name.replace("final_norm.", f"decoder.{FINAL_NORM}."),)
    position = next(position for position, halves in enumerate(HALVES) if half in halves)
    prefix = f"decoder.layers.{layer * len(HALVES) + position}."
    return tuple(prefix + alias for alias in (name, *_ENGINE_NAMES.get(name, ())))


def name_in_model(module: str, first_expert: int, number: int = 0) -> str:
    """Name a rank's module with experts numbered over all ranks.

    `number` is the expert's in the rank, where one module has the matrices of several.
    """
    module = re.sub(r"\bexperts\.(linear_)", rf"experts.local_experts.{number}.\1", module)
    return re.sub(r"(?<=local_experts\.)\d+", lambda match: str(first_expert + int(match[0])), module)


def map_checkpoint_names(
    *, is_fused: bool, is_latent: bool, has_experts: bool, has_in_proj: bool = False
) -> dict[str, str]:
    """Map the norms of a layer to their names in checkpoints.

    These are Transformer Engine's for the norms before attention and before a dense network, and the torch layers' for
    those in latent attention. `is_fused`: norms are fused with products, except those before latent attention and
    before experts, which serve several products.
    """
    if not is_fused:
        mixer = _STATE_NORM if has_in_proj else _INPUT_NORM
        return dict([mixer] if has_experts else [mixer, _MLP_NORM])
    return dict([_INPUT_NORM, _QUERY_NORM[::-1], _KEY_VALUE_NORM[::-1]] if is_latent else [])


def translate_layer(number: int) -> tuple[int, tuple[Half, ...]]:
    """Translate Megatron-Core's `layer_number` to Hugging Face's number and halves."""
    layer, position = divmod(number - 1, len(HALVES))
    return layer, HALVES[position]


def count_megatron_layers(layers: int) -> int:
    """Count the layers of Megatron-Core that make up a number of Hugging Face's."""
    return layers * len(HALVES)


def list_by_megatron_layer(flags: Sequence[bool], half: Half) -> list[int]:
    """List a property of one half by layer of Megatron-Core: 1, or 0.

    `flags` are by layer of Hugging Face.
    """
    translated = map(translate_layer, range(1, count_megatron_layers(len(flags)) + 1))
    return [int(flags[layer] and half in halves) for layer, halves in translated]


def count_earlier(flags: Sequence[int], number: int) -> int:
    """Count a property, listed by layer of Megatron-Core, before its `layer_number`."""
    return sum(flags[: number - 1])


def iterate_layers(chunk: Any) -> Iterator[tuple[int, tuple[Half, ...], Any]]:
    """Yield the Hugging Face number, the halves and the module of a chunk's layers."""
    for module in chunk.decoder.layers:
        yield (*translate_layer(module.layer_number), module)


def list_layers(chunk: Any) -> list[int]:
    """List the Hugging Face numbers of a chunk's layers."""
    return sorted({layer for layer, _, _ in iterate_layers(chunk)})


def find_final_norm(chunk: Any) -> Any:
    """Find the norm behind a chunk's last layer; None: it has none."""
    return getattr(chunk.decoder, FINAL_NORM, None)
