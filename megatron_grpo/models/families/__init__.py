"""The supported model families, and the weight map of a model from its family's table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron_grpo.config.errors import Problem, to_text
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
from megatron_grpo.models.families.user_families import list_user_families, load_family, share_families
from megatron_grpo.models.heads import Head
from megatron_grpo.models.megatron_names import TOWER
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.stored_tensors import EMBEDDING, HEAD
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, index_tensors, map_rows


def _map_outer(name: str, tensor: str, *axes: str, copy: bool = False, zero_if_absent: bool = False) -> WeightEntry:
    """Map a parameter outside layers."""
    return WeightEntry(name, axes, (HFTensor(tensor, axes),), copy, zero_if_absent)


INPUT = _map_outer("embedding.word_embeddings.weight", EMBEDDING, "vocab", "hidden")
_NORM = _map_outer("final_norm.weight", "model.norm.weight", "hidden")
# Bias of a reward model's head, which ForTokenClassification has and ForSequenceClassification lacks.
_BIAS = _map_outer("output_layer.bias", "score.bias", "score", zero_if_absent=True)
# Prefixes of the text part's names in a vision model: before "model." and "lm_head.", or in place of "model." alone.
OUTSIDE, INSIDE = "language_model.", "model.language_model."


def exchange_head(shape: ModelShape, head: Head) -> ModelShape:
    """Exchange a model's head; a scalar one is new unless the folder has one."""
    if not head.is_scalar:
        return shape
    is_stored = shape.head.is_scalar and shape.has_stored_head
    return replace(shape, tied_embeddings=False, head=head, has_stored_head=is_stored)


def name_reward_model(shape: ModelShape) -> str:
    """Name transformers' class of a family's reward models."""
    return f"{find_family(shape.family).reward_name}ForSequenceClassification"


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


def adopt_families(paths: Mapping[str, str], folders: Sequence[str]) -> list[Problem]:
    """Import the user's families, here and in later processes; report problems.

    `paths`: import paths by the setting that names them; the families of an earlier call are forgotten.
    """
    problems, keys = [], dict.fromkeys(FAMILIES, "the package")
    for key, path in paths.items():
        try:
            family = load_family(path, tuple(folders))
        except ValueError as error:
            problems.append(Problem(f"{key}={to_text(path)}", str(error)))
            continue
        if keys.setdefault(family.name, path) != path:
            text = f"has name={family.name}, as a family of {keys[family.name]}; choose another"
            problems.append(Problem(f"{key}={to_text(path)}", text))
    share_families([] if problems else paths.values(), folders)
    return problems


def explain_other_family(shape: ModelShape, path: str) -> str | None:
    """Explain that another family reads a model; None: the adopted one does."""
    family = load_family(path)
    if shape.family == family.name:
        return None
    return f"reads {family.architecture}, and the model is of the family {shape.family}; leave it out"


def list_families() -> tuple[Family, ...]:
    """List the user's families, then those of the package."""
    return (*list_user_families(), *_ALL)


def find_family(name: str) -> Family:
    """Find a family of the package or of the user."""
    return FAMILIES.get(name) or next(family for family in list_user_families() if family.name == name)


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
    family = find_family(shape.family)
    kinds = {kind for layer in range(shape.layers) for kind in shape.list_kinds(layer)}
    rows = (row for row in list_rows(family) if row.kind in kinds)
    entries = (_rename_tensors(INPUT, family), *rows, *(_rename_tensors(row, family) for row in (_NORM, *outputs)))
    if shape.text_prefix:
        entries = tuple(replace(entry, hf=tuple(map(partial(_add_prefix, shape), entry.hf))) for entry in entries)
    return (*entries, *_map_tower(shape))


def _map_tower(shape: ModelShape) -> Iterator[WeightEntry]:
    """Map the parameters of a vision tower that is trained."""
    if shape.vision is None or shape.vision.trained is None:
        return
    tower = shape.vision.trained
    for name, sizes in tower.tensors:
        yield _map_outer(f"{TOWER}{name}", f"{tower.prefix}{name}", *map(str, sizes))


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
    family = find_family(shape.family)
    is_carried_tower = shape.is_text_part and not (shape.vision and shape.vision.trained)
    parts = family.vision.parts if is_carried_tower and family.vision is not None else ()
    # Released folders have one further layer behind the last, where they have any.
    further = ("mtp.", f"model.layers.{shape.layers}.") if family.has_further_predictions else ()
    return (*further, *parts, *(f"model.{part}" for part in parts))


def is_further_prediction(name: str, shape: ModelShape) -> bool:
    """Whether a tensor is of the layers that predict further tokens (MTP)."""
    if not find_family(shape.family).has_further_predictions:
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
