"""Checks of the files of models: their config.json and their weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.paths import check_readable
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import as_value_model, build_weight_map, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import (
    PREPARED_FOLDER,
    download_config,
    find_local_folder,
    is_hub_name,
    is_made_before_run,
)
from megatron_grpo.models.stored_tensors import FLOATS, HEAD, StoredTensor, list_stored_tensors
from megatron_grpo.models.weight_map import iter_entries, list_experts
from megatron_grpo.preflight.tokenizer_checks import find_tokenizer_problems

# Most tensors that a message names.
_MAX_NAMED = 3


def find_weight_problems(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Check the weights in a folder; yields a problem of each kind."""
    try:
        tensors = list_stored_tensors(folder)
    except ValueError as error:
        yield str(error)
        return
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    required_shapes = {name: expected for name, expected, is_required in _list_tensors(shape) if is_required}
    missing = [name for name in required_shapes if name not in shapes]
    if missing:
        others = f", and {len(missing) - 1} others that config.json implies" if len(missing) > 1 else ""
        yield f"the folder has no tensor {missing[0]}{others}"
    packed = next((name for name in required_shapes if name in tensors and tensors[name].dtype not in FLOATS), None)
    if packed is not None:
        text = "quantized weights cannot be trained; convert the model to bfloat16 first, as docs/layouts.md shows"
        yield f"{packed} is stored as {tensors[packed].dtype}: {text}"
        return
    for name, expected in required_shapes.items():
        if name in shapes and shapes[name] != expected:
            yield f"{name} has shape {list(shapes[name])}, but config.json implies {list(expected)}"
            return
    unread = _list_unread_tensors(tensors, shape)
    if unread:
        yield (
            f"the folder holds {len(unread)} tensor(s) that a model of its config.json does not have, which would be "
            f"lost: {', '.join(unread[:_MAX_NAMED])}; correct architectures in config.json, or remove them from the "
            "files"
        )


def _list_tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield (name, shape, whether it is required) of tensors."""
    for entry, layer, _ in iter_entries(build_weight_map(shape), shape, list(range(shape.layers))):
        for expert in list_experts(entry, shape):
            for tensor in entry.hf:
                yield (
                    tensor.name.format(layer=layer, expert=expert),
                    tensor.compute_shape(shape),
                    not entry.zero_if_absent,
                )


def _is_extra_prediction(name: str, shape: ModelShape) -> bool:
    """True for DeepSeek's layers behind the last, which predict further tokens."""
    layer = re.match(r"model\.layers\.(\d{1,6})\.", name)
    return shape.family == "deepseek_v3" and layer is not None and int(layer[1]) >= shape.layers


def _list_unread_tensors(tensors: Mapping[str, StoredTensor], shape: ModelShape) -> list[str]:
    """List tensors that the model neither reads nor derives."""
    derived = ["rotary_emb.inv_freq", "rotary.inv_freq"]
    if shape.tied_embeddings or shape.value_head is not None:  # equal to the embedding, or replaced by the value head
        derived.append(HEAD)
    unknown = tensors.keys() - {name for name, _, _ in _list_tensors(shape)}
    return sorted(
        name for name in unknown if not name.endswith(tuple(derived)) and not _is_extra_prediction(name, shape)
    )


def list_unused_tensors(config: Config) -> Iterator[Problem]:
    """Remark on layers in the policy's folder that are not trained."""
    path = config.policy.model.path
    if is_hub_name(path) or is_made_before_run(config, path):
        return
    shape = read_model_shape(path)
    extra = [name for name in list_stored_tensors(Path(path)) if _is_extra_prediction(name, shape)]
    if extra:
        text = f"holds {len(extra)} tensor(s) of layers that predict further tokens (num_nextn_predict_layers), which"
        yield Problem(f"policy.model.path={path}", f"{text} are neither trained nor exported: {sorted(extra)[0]}, …")


def find_model_problems(config: Config) -> Iterator[Problem]:
    """Check policy.model.path and value.model.path."""
    for key, path in (("policy.model.path", config.policy.model.path), ("value.model.path", config.value.model.path)):
        if path is None:
            continue
        subject, is_value_model = f"{key}={path}", key.startswith("value.")
        if is_made_before_run(config, path):
            if Path(path) != Path(config.prepare.folder, PREPARED_FOLDER):
                yield Problem(subject, f"prepare.name={config.prepare.name} makes one model: {PREPARED_FOLDER}")
            continue
        unusable = list(explain_unusable_model(subject, path, is_value_model=is_value_model))
        yield from unusable
        if not unusable and not is_hub_name(path):  # weights of a hub model are downloaded at the start
            yield from _find_missing_files(subject, Path(path), is_value_model=is_value_model)
            if not is_value_model:
                yield from find_tokenizer_problems(subject, Path(path), config, read_model_shape(path).vocab)


def explain_unusable_model(subject: str, path: str, *, is_value_model: bool = False) -> Iterator[Problem]:
    """Say why a folder or hub name has no trainable model."""
    if is_hub_name(path):
        reason = None if find_local_folder(path) else download_config(path)
        text = f"no such folder here, nor in the Hugging Face cache, and the hub says: {reason}"
    else:
        reason = check_readable(path, "folder")
        advice = "; give a folder in Hugging Face format, or a hub name such as Qwen/Qwen3-8B"
        text = f"{reason}{advice if reason == 'no such folder' else ''}"
    if reason is not None:
        yield Problem(subject, text)
        return
    folder = find_local_folder(path)
    assert folder is not None
    try:
        read_model_shape(folder, reward_models=is_value_model)
    except ValueError as error:
        yield Problem(subject, str(error))


def _find_missing_files(subject: str, folder: Path, *, is_value_model: bool) -> Iterator[Problem]:
    if not any(folder.glob("*.safetensors")):
        text = "the folder holds no *.safetensors; convert the weights with transformers' save_pretrained"
        yield Problem(subject, text)
        return
    shape = read_model_shape(folder, reward_models=is_value_model)
    for text in find_weight_problems(folder, as_value_model(shape) if is_value_model else shape):
        yield Problem(subject, text)
