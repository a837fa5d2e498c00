"""The supported model families; sizes, weight map and operation counts of a model from its family's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families import deepseek_v3, gemma3, gemma4, llama, llama4, mixtures
from megatron_grpo.models.families.options import refuse_folder
from megatron_grpo.models.shape import ModelShape, read_config_json, read_section
from megatron_grpo.models.stored_tensors import EMBEDDING, HEAD, has_own_head
from megatron_grpo.models.weight_axes import measure_axis
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, index_tensors, iter_entries, map_rows


def _map_outer(name: str, tensor: str, *axes: str, copy: bool = False, zero_if_absent: bool = False) -> WeightEntry:
    """Map a parameter outside layers."""
    return WeightEntry(name, axes, (HFTensor(tensor, axes),), copy, zero_if_absent)


_INPUT = _map_outer("embedding.word_embeddings.weight", EMBEDDING, "vocab", "hidden")
_NORM = _map_outer("final_norm.weight", "model.norm.weight", "hidden")
# Bias of a reward model's head, which ForTokenClassification has and ForSequenceClassification lacks.
_BIAS = _map_outer("output_layer.bias", "score.bias", "score", zero_if_absent=True)


def as_value_model(shape: ModelShape) -> ModelShape:
    """Convert a shape to a value model's, with its own head."""
    return replace(shape, tied_embeddings=False, value_head=shape.value_head or "fresh")


_ALL = (
    *llama.FAMILIES,
    gemma3.FAMILY,
    *mixtures.FAMILIES,
    deepseek_v3.FAMILY,
    llama4.FAMILY,
    gemma4.FAMILY,
)
FAMILIES = {family.name: family for family in _ALL}

# Keys of the config.json of models that read images, video or sound; those of text alone have none of them.
_MEDIA = {"vision_config", "audio_config", "thinker_config", "visual", "img_processor"}
_MEDIA |= {"image_token_id", "mm_vision_tower"}
# Suffixes of architectures whose output is a score.
_REWARD_HEADS = ("ForSequenceClassification", "ForTokenClassification")


def build_weight_map(shape: ModelShape) -> tuple[WeightEntry, ...]:
    """Build the weight map of a model, in the order of export."""
    if shape.value_head is not None:
        is_new = shape.value_head == "fresh"
        outputs = [_map_outer("output_layer.weight", "score.weight", "score", "hidden", zero_if_absent=is_new), _BIAS]
    else:
        # A tied head has weights of its own only on a last stage that is not the first.
        tensor = EMBEDDING if shape.tied_embeddings else HEAD
        outputs = [_map_outer("output_layer.weight", tensor, "vocab", "hidden", copy=shape.tied_embeddings)]
    family = FAMILIES[shape.family]
    kinds = {kind for layer in range(shape.layers) for kind in shape.list_kinds(layer)}
    rows = (row for table in family.tables for row in map_rows(table, family.renamed) if row.kind in kinds)
    return (_INPUT, *rows, _NORM, *outputs)


def measure_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Compute the shapes of a model's tensors, by name, in the order of export."""
    sizes = shape.sizes
    return {name: key.tensor.measure(sizes) for name, key in index_tensors(build_weight_map(shape), shape).items()}


def count_forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Count floating-point operations of one forward pass, regardless of padding.

    Two per token and weight of a matrix that the token passes (Chowdhery et al. 2022, "PaLM", appendix B), with the
    output layer and without the embedding look-up; and, in each head and layer, two per visible query-key pair and
    element of a query and of a value. A token sees its own sequence up to itself: s (s + 1) / 2 pairs for s tokens; in
    a layer with a window of w it sees the last w tokens, so tokens beyond the w-th make w pairs each, and in a layer
    with chunks those of its chunk up to itself. A value model counts as the language model that it starts from.
    """
    weights, sizes = 0, shape.sizes
    for entry, _, _ in iter_entries(build_weight_map(replace(shape, value_head=None)), shape, range(shape.layers)):
        if entry is not _INPUT:
            passed = shape.experts.top_k if shape.experts is not None and entry.per_expert else 1
            weights += passed * prod(measure_axis(axis, sizes) for axis in entry.axes) if len(entry.axes) == 2 else 0
    pairs = windowed_pairs = sum(map(_count_causal_pairs, lengths))
    if shape.window is not None:
        windowed_pairs = sum(_count_windowed_pairs(length, shape.window, shape.chunked) for length in lengths)
    products, latent = 0, shape.latent
    for layer in range(shape.layers):
        head = 2 * shape.find_heads(layer).head_dim
        head = head if latent is None else latent.plain_dim + latent.rope_dim + latent.value_dim
        products += head * (windowed_pairs if shape.windowed and shape.windowed[layer] else pairs)
    return 2.0 * weights * sum(lengths) + 2.0 * shape.attention_heads * products


def _count_causal_pairs(length: int) -> int:
    return length * (length + 1) // 2


def _count_windowed_pairs(length: int, window: int, is_chunk: bool) -> int:
    if is_chunk:
        return length // window * _count_causal_pairs(window) + _count_causal_pairs(length % window)
    return _count_causal_pairs(min(length, window)) + window * max(length - window, 0)


def read_model_shape(path: str | Path, *, reward_models: bool = False) -> ModelShape:
    """Read a model's sizes from its folder; reward models only if asked for.

    Raises:
        ValueError: the folder cannot be read, or its model has no support (`parse_model_shape`); names the file.
    """
    folder = Path(path)
    refuse_folder(folder)
    file = folder / "config.json"
    raw = read_config_json(file)
    try:
        shape = parse_model_shape(raw, reward_models=reward_models)
        _refuse_head_size(raw, shape)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    # transformers and vLLM compare the tensors themselves, and believe them rather than the file.
    if shape.tied_embeddings and shape.value_head is None and has_own_head(folder):
        return replace(shape, tied_embeddings=False)
    return shape


def _refuse_head_size(raw: dict[str, Any], shape: ModelShape) -> None:
    # vLLM does not read head_dim of these families.
    if shape.family == "qwen2":
        derived, formula = shape.hidden // shape.attention_heads, "hidden_size / num_attention_heads"
    elif shape.latent is not None:
        derived, formula = shape.latent.rope_dim, "qk_rope_head_dim"
    else:
        return
    if raw.get("head_dim", derived) != derived:
        text = f"head_dim={to_text(raw['head_dim'])} is not supported for {shape.family}: vLLM takes {formula}"
        raise ValueError(f"{text} = {derived}; leave the key out")


def is_untied_by_weights(path: str | Path) -> bool:
    """Whether config.json ties the head, and the folder stores another one."""
    try:
        raw = read_config_json(Path(path) / "config.json")
        return parse_model_shape(raw).tied_embeddings and not read_model_shape(path).tied_embeddings
    except ValueError:
        return False


def has_query_scales(path: str | Path) -> bool | None:
    """Whether a Llama 4 scales queries by position; None: another model."""
    try:
        shape = read_model_shape(path)
    except ValueError:
        return None
    return shape.query_scale is not None if shape.family == "llama4" else None


def parse_model_shape(raw: dict[str, Any], *, reward_models: bool = False) -> ModelShape:
    """Read sizes from a config.json; ValueError: no support, or an invalid size."""
    architectures = raw.get("architectures") or ["(none)"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ValueError(f"architectures={to_text(architectures)} must be a list of names")
    architecture = architectures[0]
    scores = reward_models and architecture.endswith(_REWARD_HEADS)
    family = next((family for family in FAMILIES.values() if family.has_architecture(architecture, scores)), None)
    if family is None:
        planned = ": it reads images or sound, and such models are planned" if _MEDIA & raw.keys() else ""
        names = ", ".join(family.architecture for family in FAMILIES.values())
        raise ValueError(f"architecture {architecture} is not supported{planned}; supported: {names}")
    model_type = family.model_type or family.name
    if raw.get("model_type", model_type) != model_type:
        text = f"model_type={to_text(raw['model_type'])} is not that of {architecture}, and transformers goes by it"
        raise ValueError(f"{text}, vLLM by the architecture; if that is right, write model_type={model_type}")
    if scores:
        labels = raw.get("num_labels") or len(read_section(raw, "id2label")) or 2  # transformers' default is 2
        if labels != 1:
            raise ValueError(f"{architecture} with {labels} labels is a classifier; a reward model has 1")
    shape = family.read(raw)
    return replace(shape, value_head="stored") if scores else shape
