"""Reads a model's sizes from its folder: config.json, and the form that the stored tensors have."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families import (
    INSIDE,
    OUTSIDE,
    add_text_prefix,
    build_weight_map,
    find_family,
    list_families,
)
from megatron_grpo.models.families.family import Family, VisionModel
from megatron_grpo.models.families.image_settings import read_vision_shape, select_text_keys
from megatron_grpo.models.families.options import refuse_folder
from megatron_grpo.models.heads import VALUE
from megatron_grpo.models.shape import ModelShape, read_config_json, read_flag, read_section
from megatron_grpo.models.stored_tensors import HEAD, has_own_head, list_stored_tensors
from megatron_grpo.models.vision_shape import TrainedTower
from megatron_grpo.models.weight_map import index_tensors

# Keys of the config.json of models that read images, video or sound; those of text alone have none of them.
_MEDIA = {"vision_config", "audio_config", "thinker_config", "visual", "img_processor"}
_MEDIA |= {"image_token_id", "mm_vision_tower"}
# Suffixes of architectures whose output is a score.
_REWARD_HEADS = ("ForSequenceClassification", "ForTokenClassification")


class UnknownFamilyError(ValueError):
    """A model's architecture has no family."""


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


def include_tower(shape: ModelShape, folder: str | Path) -> ModelShape:
    """Include the vision tower of a folder in what is trained.

    ValueError: the model takes no images, or the folder cannot be read.
    """
    vision = find_family(shape.family).vision
    if shape.vision is None or vision is None:
        raise ValueError(f"{folder} has a model that takes no images in training, and so no vision tower to train")
    stored = {name: tensor.shape for name, tensor in list_stored_tensors(Path(folder)).items()}
    prefixes = [prefix for part in vision.parts for prefix in (part, f"model.{part}")]
    prefix = next(prefix for prefix in prefixes if any(name.startswith(prefix) for name in stored))
    names = sorted(name for name in stored if name.startswith(prefix))
    tensors = tuple((name.removeprefix(prefix), tuple(stored[name])) for name in names)
    tower = TrainedTower(folder=str(folder), tensors=tensors, prefix=prefix)
    return replace(shape, vision=replace(shape.vision, trained=tower))


def _find_stored_form(shape: ModelShape, folder: Path) -> ModelShape:
    """Correct prefixes of names and packing of experts by the tensors."""
    experts = [shape.experts]
    if shape.experts is not None:
        experts.append(replace(shape.experts, packed=not shape.experts.packed))
    prefixes = [shape.text_prefix, *((OUTSIDE, INSIDE) if shape.is_text_part else ())]
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
    vision = find_family(shape.family).vision
    if not shape.is_text_part or vision is None or vision.text_model_type is not None:
        return  # a text part with a model_type of its own has no head, and both read the first setting
    tied = read_flag(raw, "tie_word_embeddings", default=vision.has_tied_head)
    ties = [tied, find_family(shape.family).read(_select_text_part(raw, vision)).tied_embeddings]
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
        raise ValueError(
            f"head_dim={to_text(raw['head_dim'])} is not supported for {shape.family}: "
            f"vLLM takes {formula} = {derived}; leave the key out"
        )


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
    family = next((family for family in list_families() if stated in family.other_model_types), None)
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
    family = next((family for family in list_families() if family.has_architecture(architecture, scores)), None)
    family = family or _find_vision_family(raw, architecture)
    if family is None:
        planned = ": it reads images or sound, and such models are planned" if _MEDIA & raw.keys() else ""
        names = ", ".join(family.architecture for family in list_families())
        raise UnknownFamilyError(f"architecture {architecture} is not supported{planned}; supported: {names}")
    vision = family.vision
    if vision is not None and architecture == vision.architecture:
        _require_model_type(raw, (vision.model_type,), architecture)
        shape = family.read(_select_text_part(raw, vision))
        if vision.packs_experts and shape.experts is not None:
            shape = replace(shape, experts=replace(shape.experts, packed=True))
        if vision.images is not None:
            shape = replace(shape, vision=read_vision_shape(raw, vision.images, shape))
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
        raise ValueError(
            f"model_type={to_text(raw['model_type'])} is not that of {architecture}, and transformers goes by it, vLLM "
            f"by the architecture; if that is right, write model_type={model_types[0]}"
        )


def _find_vision_family(raw: dict[str, Any], architecture: str) -> Family | None:
    """Find the family of a vision model's text part; None: unknown."""
    families = [family for family in list_families() if family.vision and family.vision.architecture == architecture]
    if not families:
        return None
    text = read_section(raw, "text_config")
    if not text and families[0].vision is not None and families[0].vision.is_flat:
        return families[0]
    if not text:
        raise ValueError(f"text_config is missing, in which {architecture} has its sizes")
    by_type = {_find_text_type(family): family for family in families}
    if (stated := text.get("model_type", next(iter(by_type)))) not in by_type:
        raise ValueError(
            f"text_config.model_type={to_text(stated)} is not supported in {architecture}; use {' or '.join(by_type)}"
        )
    return by_type[stated]


def _find_text_type(family: Family) -> str:
    model_type = family.model_type or family.name
    return model_type if family.vision is None else family.vision.text_model_type or model_type


def _select_text_part(raw: dict[str, Any], vision: VisionModel) -> dict[str, Any]:
    """Select the keys of the language model in a model that also sees images."""
    text = dict(read_section(raw, "text_config"))
    if vision.images is not None:
        text = select_text_keys(text or raw, vision.images)
    quantized: dict[str, Any] = {key: raw[key] for key in ("quantization_config", "compression_config") if key in raw}
    return {**quantized, **text}
