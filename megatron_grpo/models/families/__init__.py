"""The supported model families; sizes, weight map and operation counts of a model from its family's table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families import (
    deepseek_v3,
    deepseek_v32,
    full_width,
    gemma3,
    gemma4,
    glm,
    gpt_oss,
    llama,
    llama4,
    mistral,
    mixtures,
    nemotron_h,
    phi,
    qwen3_5,
)
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.options import refuse_folder
from megatron_grpo.models.heads import LOGITS, VALUE, Head
from megatron_grpo.models.shape import ModelShape, read_config_json, read_flag, read_section
from megatron_grpo.models.stored_tensors import EMBEDDING, HEAD, has_own_head, list_stored_tensors
from megatron_grpo.models.weight_axes import measure_axis
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, index_tensors, iter_entries, map_rows


def _map_outer(name: str, tensor: str, *axes: str, copy: bool = False, zero_if_absent: bool = False) -> WeightEntry:
    """Map a parameter outside layers."""
    return WeightEntry(name, axes, (HFTensor(tensor, axes),), copy, zero_if_absent)


_INPUT = _map_outer("embedding.word_embeddings.weight", EMBEDDING, "vocab", "hidden")
_NORM = _map_outer("final_norm.weight", "model.norm.weight", "hidden")
# Bias of a reward model's head, which ForTokenClassification has and ForSequenceClassification lacks.
_BIAS = _map_outer("output_layer.bias", "score.bias", "score", zero_if_absent=True)
# Prefixes of the text part's names in a vision model: before "model." and "lm_head.", or in place of "model." alone.
OUTSIDE, INSIDE = "language_model.", "model.language_model."


class UnknownFamilyError(ValueError):
    """A model's architecture has no family."""


def exchange_head(shape: ModelShape, head: Head) -> ModelShape:
    """Exchange a model's head; a scalar one is new unless the folder has one."""
    if not head.is_scalar:
        return shape
    is_stored = shape.head.is_scalar and shape.has_stored_head
    return replace(shape, tied_embeddings=False, head=head, has_stored_head=is_stored)


def name_reward_model(shape: ModelShape) -> str:
    """Name transformers' class of a family's reward models."""
    return f"{FAMILIES[shape.family].reward_name}ForSequenceClassification"


_ALL = (
    *llama.FAMILIES,
    gemma3.FAMILY,
    *mixtures.FAMILIES,
    deepseek_v3.FAMILY,
    *deepseek_v32.FAMILIES,
    *glm.FAMILIES,
    phi.FAMILY,
    *full_width.FAMILIES,
    gpt_oss.FAMILY,
    *qwen3_5.FAMILIES,
    llama4.FAMILY,
    gemma4.FAMILY,
    nemotron_h.FAMILY,
    *mistral.FAMILIES,
)
FAMILIES = {family.name: family for family in _ALL}

# Keys of the config.json of models that read images, video or sound; those of text alone have none of them.
_MEDIA = {"vision_config", "audio_config", "thinker_config", "visual", "img_processor"}
_MEDIA |= {"image_token_id", "mm_vision_tower"}
# Suffixes of architectures whose output is a score.
_REWARD_HEADS = ("ForSequenceClassification", "ForTokenClassification")


def build_weight_map(shape: ModelShape) -> tuple[WeightEntry, ...]:
    """Build the weight map of a model, in the order of export."""
    if shape.head.is_scalar:
        is_new = not shape.has_stored_head
        outputs = [_map_outer("output_layer.weight", "score.weight", "score", "hidden", zero_if_absent=is_new)]
        outputs += [_BIAS] if shape.head.has_bias else []
    else:
        # A tied head has weights of its own only on a last stage that is not the first.
        tensor = EMBEDDING if shape.tied_embeddings else HEAD
        outputs = [_map_outer("output_layer.weight", tensor, "vocab", "hidden", copy=shape.tied_embeddings)]
    family = FAMILIES[shape.family]
    kinds = {kind for layer in range(shape.layers) for kind in shape.list_kinds(layer)}
    rows = (row for row in list_rows(family) if row.kind in kinds)
    entries = (_rename_tensors(_INPUT, family), *rows, *(_rename_tensors(row, family) for row in (_NORM, *outputs)))
    if not shape.text_prefix:
        return entries
    return tuple(replace(entry, hf=tuple(map(partial(_add_prefix, shape), entry.hf))) for entry in entries)


def list_rows(family: Family) -> list[WeightEntry]:
    """List the rows of a family's tables."""
    return [_rename_tensors(row, family) for table in family.tables for row in map_rows(table)]


def _rename_tensors(entry: WeightEntry, family: Family) -> WeightEntry:
    return replace(entry, hf=tuple(replace(tensor, name=family.rename(tensor.name)) for tensor in entry.hf))


def _add_prefix(shape: ModelShape, tensor: HFTensor) -> HFTensor:
    return replace(tensor, name=add_text_prefix(tensor.name, shape.text_prefix))


def add_text_prefix(name: str, prefix: str) -> str:
    """Name a text model's tensor as a vision model does."""
    return re.sub(r"^model\.", prefix, name) if prefix == INSIDE else prefix + name


def remove_text_prefix(name: str, prefix: str) -> str:
    """Name a tensor of a vision model's text part as the text model does."""
    return re.sub(f"^{re.escape(prefix)}", "model." if prefix == INSIDE else "", name)


def list_carried(shape: ModelShape) -> tuple[str, ...]:
    """List beginnings of names of tensors that exports copy."""
    family = FAMILIES[shape.family]
    parts = family.vision.parts if shape.text_prefix and family.vision is not None else ()
    # Released folders have one further layer behind the last, where they have any.
    further = ("mtp.", f"model.layers.{shape.layers}.") if family.has_further_predictions else ()
    return (*further, *parts, *(f"model.{part}" for part in parts))


def is_further_prediction(name: str, shape: ModelShape) -> bool:
    """Whether a tensor is of the layers that predict further tokens (MTP)."""
    if not FAMILIES[shape.family].has_further_predictions:
        return False
    layer = re.match(r"model\.layers\.(\d{1,6})\.", name)  # DeepSeek's are behind the last layer, Nemotron's beside all
    return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= shape.layers)


def is_carried(name: str, shape: ModelShape) -> bool:
    """Whether a tensor is copied to exports without being trained."""
    layer = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", name)
    if shape.indexer is not None and layer is not None:
        # Released files have an indexer in each layer, also where layers share a choice.
        number = int(layer[1])
        return number < shape.layers and not shape.indexer.layers[number]
    return is_further_prediction(name, shape) or name.startswith(list_carried(shape))


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
    with chunks those of its chunk up to itself. In a delta net a token multiplies each head's matrix three times, to
    read what it holds for the key, to write, and to read for the query; in a layer with Mamba it writes into each
    head's state, and reads from it. An indexer multiplies its queries by the keys of all visible pairs, and attention
    then sees as many tokens as it chooses. A value model counts as the language model that it starts from.
    """
    weights, sizes = 0, shape.sizes
    for entry, _, _ in iter_entries(build_weight_map(replace(shape, head=LOGITS)), shape, range(shape.layers)):
        if entry.name != _INPUT.name:
            passed = shape.experts.top_k if shape.experts is not None and entry.per_expert else 1
            weights += passed * prod(measure_axis(axis, sizes) for axis in entry.axes) if len(entry.axes) >= 2 else 0
    if (mamba := shape.mamba) is not None:
        weights += 2 * shape.count_layers("mamba") * mamba.heads * mamba.head_dim * mamba.state
    if (delta := shape.delta) is not None:
        weights += shape.count_layers("delta") * 3 * delta.value_heads * delta.key_dim * delta.value_dim
    pairs = windowed_pairs = sum(map(_count_causal_pairs, lengths))
    if shape.window is not None:
        windowed_pairs = sum(_count_windowed_pairs(length, shape.window, shape.chunked) for length in lengths)
    index_products = 0
    if (indexer := shape.indexer) is not None:  # which scores all pairs
        index_products = sum(indexer.layers) * indexer.heads * indexer.head_dim * pairs
        pairs = sum(_count_windowed_pairs(length, indexer.top_k, is_chunk=False) for length in lengths)
    products, latent = 0, shape.latent
    for layer in range(shape.layers):
        if not shape.list_kinds(layer) & {"attention", "global", "latent"}:
            continue
        head = 2 * shape.find_heads(layer).head_dim
        head = head if latent is None else latent.plain_dim + latent.rope_dim + latent.value_dim
        products += head * (windowed_pairs if shape.windowed and shape.windowed[layer] else pairs)
    return 2.0 * weights * sum(lengths) + 2.0 * shape.attention_heads * products + 2.0 * index_products


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
        raise type(error)(f"{file}: {error}") from None
    shape = _find_stored_form(shape, folder)
    if shape.tied_embeddings and not shape.head.is_scalar:
        # transformers and vLLM compare the tensors themselves, and believe them rather than the file.
        embedding = build_weight_map(shape)[0].hf[0].name
        if has_own_head(folder, add_text_prefix(HEAD, shape.text_prefix), embedding):
            return replace(shape, tied_embeddings=False)
        if any(folder.glob("*.safetensors")):
            _require_equal_ties(raw, shape, file)
    return shape


def _find_stored_form(shape: ModelShape, folder: Path) -> ModelShape:
    """Correct prefixes of names and packing of experts by the tensors."""
    experts = [shape.experts]
    if shape.experts is not None:
        experts.append(replace(shape.experts, packed=not shape.experts.packed))
    prefixes = [shape.text_prefix, *((OUTSIDE, INSIDE) if shape.text_prefix else ())]
    forms = [replace(shape, experts=form, text_prefix=prefix) for form in experts for prefix in prefixes]
    names = [_list_names(form) for form in forms]
    if all(form == names[0] for form in names):
        return shape
    try:
        stored = list_stored_tensors(folder).keys()
    except ValueError:  # other checks report files that cannot be read
        return shape
    return forms[max(range(len(forms)), key=lambda number: len(names[number] & stored))]


def _list_names(shape: ModelShape) -> Set[str]:
    """List the names of a model's tensors, with one expert a layer."""
    form = shape if shape.experts is None else replace(shape, experts=replace(shape.experts, count=1))
    return index_tensors(build_weight_map(form), form).keys()


def _require_equal_ties(raw: dict[str, Any], shape: ModelShape, file: Path) -> None:
    """Refuse a vision model whose head only one reader ties."""
    vision = FAMILIES[shape.family].vision
    if not shape.text_prefix or vision is None:
        return
    tied = read_flag(raw, "tie_word_embeddings", default=vision.has_tied_head)
    ties = [tied, FAMILIES[shape.family].read(_select_text_part(raw)).tied_embeddings]
    if ties[0] != ties[1]:
        values = f"tie_word_embeddings={to_text(ties[0])} and text_config.tie_word_embeddings={to_text(ties[1])}"
        text = "differ; transformers reads the first and vLLM the second, and the folder has no head of its own"
        raise ValueError(f"{file}: {values} {text}")


def _refuse_head_size(raw: dict[str, Any], shape: ModelShape) -> None:
    if shape.family == "glm_moe_dsa":  # transformers and vLLM both replace any number
        if raw.get("head_dim", 0) is None:
            raise ValueError(f"head_dim=null is not supported for {shape.family}; leave the key out")
        return
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


def find_model_type(raw: Mapping[str, Any]) -> Any:
    """Find the model_type by which transformers, without code of a model, knows it."""
    stated = raw.get("model_type")
    family = next((family for family in FAMILIES.values() if stated in family.other_model_types), None)
    return stated if family is None else family.model_type or family.name


def find_model_shape(path: str | Path) -> ModelShape | None:
    """Read a model's sizes from its folder; None: not supported."""
    try:
        return read_model_shape(path)
    except ValueError:
        return None


def parse_model_shape(raw: dict[str, Any], *, reward_models: bool = False) -> ModelShape:
    """Read sizes from a config.json; ValueError: no support, or an invalid size."""
    architectures = raw.get("architectures") or ["(none)"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ValueError(f"architectures={to_text(architectures)} must be a list of names")
    architecture = architectures[0]
    scores = reward_models and architecture.endswith(_REWARD_HEADS)
    family = next((family for family in FAMILIES.values() if family.has_architecture(architecture, scores)), None)
    family = family or _find_vision_family(raw, architecture)
    if family is None:
        planned = ": it reads images or sound, and such models are planned" if _MEDIA & raw.keys() else ""
        names = ", ".join(family.architecture for family in FAMILIES.values())
        raise UnknownFamilyError(f"architecture {architecture} is not supported{planned}; supported: {names}")
    vision = family.vision
    if vision is not None and architecture == vision.architecture:
        _require_model_type(raw, (vision.model_type,), architecture)
        shape = family.read(_select_text_part(raw))
        tied = shape.tied_embeddings or read_flag(raw, "tie_word_embeddings", default=False)
        return replace(shape, tied_embeddings=tied, text_prefix=vision.text_prefix)
    _require_model_type(raw, (family.model_type or family.name, *family.other_model_types), architecture)
    if raw.get("text_config") is not None:  # of which vLLM takes all sizes, and transformers none
        raise ValueError(f"text_config is not supported in {architecture}; write its keys beside architectures instead")
    if scores:
        labels = raw.get("num_labels") or len(read_section(raw, "id2label")) or 2  # transformers' default is 2
        if labels != 1:
            raise ValueError(f"{architecture} with {labels} labels is a classifier; a reward model has 1")
    shape = family.read(raw)
    return replace(shape, head=VALUE) if scores else shape


def _require_model_type(raw: dict[str, Any], model_types: tuple[str, ...], architecture: str) -> None:
    if raw.get("model_type", model_types[0]) not in model_types:
        text = f"model_type={to_text(raw['model_type'])} is not that of {architecture}, and transformers goes by it"
        raise ValueError(f"{text}, vLLM by the architecture; if that is right, write model_type={model_types[0]}")


def _find_vision_family(raw: dict[str, Any], architecture: str) -> Family | None:
    """Find the family of a vision model's text part; None: unknown."""
    families = [family for family in FAMILIES.values() if family.vision and family.vision.architecture == architecture]
    if not families:
        return None
    text = read_section(raw, "text_config")
    if not text:
        raise ValueError(f"text_config is missing, in which {architecture} has its sizes")
    by_type = {family.model_type or family.name: family for family in families}
    if (stated := text.get("model_type", next(iter(by_type)))) not in by_type:
        raise ValueError(
            f"text_config.model_type={to_text(stated)} is not supported in {architecture}; use {' or '.join(by_type)}"
        )
    return by_type[stated]


def _select_text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Select the keys of the language model in a model that also sees images."""
    text = dict(read_section(raw, "text_config"))
    quantized: dict[str, Any] = {key: raw[key] for key in ("quantization_config", "compression_config") if key in raw}
    return {**quantized, **text}
