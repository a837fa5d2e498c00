"""Checks of the folders and hub names of models: whether they exist, are of a known family, and are complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.paths import unreadable
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.tokenizer_files import tokenizer_problems
from megatron_grpo.weights.families import as_value_model, shape_of_folder, weight_entries
from megatron_grpo.weights.families.family import global_entries, wanted_experts
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.source import (
    PREPARED_FOLDER,
    download_config,
    is_hub_name,
    local_folder,
    made_before_the_run,
)

_INDEX_FILE, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


def weight_problems(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Problems of the weights in a folder for a model of these sizes; only the first problem of each kind."""
    try:
        shapes = _tensor_shapes(folder)
    except ValueError as error:
        yield str(error)
        return
    wanted = {name: expected for name, expected, required in _tensors_of(shape) if required}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        more = f", and {len(missing) - 1} others that config.json implies" if len(missing) > 1 else ""
        yield f"the folder has no tensor {missing[0]}{more}"
    for name, expected in wanted.items():
        if name in shapes and shapes[name] != expected:
            yield f"{name} has shape {list(shapes[name])}, but config.json implies {list(expected)}"
            return


def _tensors_of(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name and shape of every tensor of a model, and whether a folder must have it."""
    for entry, layer, _ in global_entries(weight_entries(shape), shape, list(range(shape.layers))):
        for expert in wanted_experts(entry, shape):
            for tensor in entry.hf:
                yield tensor.name.format(layer=layer, expert=expert), tensor.shape(shape), not entry.zero_if_absent


def unused_tensors(config: Config) -> Iterator[Problem]:
    """The remark that the policy's folder, which has no problems, holds tensors that the model does not have."""
    path = config.policy.model.path
    if is_hub_name(path) or made_before_the_run(config, path):
        return
    folder, shape = Path(path), shape_of_folder(path)
    derived = ("inv_freq", *(["lm_head.weight"] if shape.tied_embeddings else []))
    unknown = _tensor_shapes(folder).keys() - {name for name, _, _ in _tensors_of(shape)}
    unused = sorted(name for name in unknown if not name.endswith(derived))
    if unused:
        text = f"holds {len(unused)} tensor(s) that a model of its config.json does not have, which are not loaded"
        yield Problem(f"policy.model.path={path}", f"{text}: {', '.join(unused[:_NAMED])}")


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the folder; ValueError names a file that is missing, truncated or not safetensors."""
    index = folder / _INDEX_FILE
    if not index.is_file():
        return _shapes_in(folder / _SINGLE_FILE, f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except OSError as error:
        raise ValueError(f"{index} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f'{index} is not a safetensors index (JSON with a "weight_map")') from None
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        shapes |= _shapes_in(folder / str(name), f"{folder / str(name)} does not exist, but {_INDEX_FILE} names it")
    return shapes


def _shapes_in(file: Path, missing: str) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(missing) from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from None


_NAMED = 3
"""Most tensors that a remark names."""


def model_problems(config: Config) -> Iterator[Problem]:
    """Problems of policy.model.path and value.model.path."""
    for key, path in (("policy.model.path", config.policy.model.path), ("value.model.path", config.value.model.path)):
        if path is None:
            continue
        subject, of_value = f"{key}={path}", key.startswith("value.")
        if made_before_the_run(config, path):
            if Path(path) != Path(config.prepare.folder, PREPARED_FOLDER):
                yield Problem(subject, f"prepare.name={config.prepare.name} makes one model: {PREPARED_FOLDER}")
            continue
        unusable = list(_unusable(subject, path, of_value=of_value))
        yield from unusable
        if not unusable and not is_hub_name(path):  # weights of a hub model are downloaded at the start
            yield from _incomplete(subject, Path(path), of_value=of_value)
            if not of_value:
                yield from tokenizer_problems(subject, Path(path), config, shape_of_folder(path).vocab)


def _unusable(subject: str, path: str, *, of_value: bool) -> Iterator[Problem]:
    """A folder or hub name without a trainable model: it is missing, or its config.json is not supported."""
    if is_hub_name(path):
        reason = None if local_folder(path) else download_config(path)
        text = f"no such folder here, nor in the Hugging Face cache, and the hub says: {reason}"
    else:
        reason = unreadable(path, "folder")
        advice = "; give a folder in Hugging Face format, or a hub name such as Qwen/Qwen3-8B"
        text = f"{reason}{advice if reason == 'no such folder' else ''}"
    if reason is not None:
        yield Problem(subject, text)
        return
    folder = local_folder(path)
    assert folder is not None
    try:
        shape_of_folder(folder, reward_models=of_value)
    except ValueError as error:
        yield Problem(subject, str(error))


def _incomplete(subject: str, folder: Path, *, of_value: bool) -> Iterator[Problem]:
    if not any(folder.glob("*.safetensors")):
        text = "the folder holds no *.safetensors; convert the weights with transformers' save_pretrained"
        yield Problem(subject, text)
        return
    shape = shape_of_folder(folder, reward_models=of_value)
    for text in weight_problems(folder, as_value_model(shape) if of_value else shape):
        yield Problem(subject, text)
