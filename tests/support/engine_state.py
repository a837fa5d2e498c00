"""All tensors, numbers and objects that a model of vLLM holds, wherever it keeps them."""

import enum
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_BOOKKEEPING = {"_modules", "prefix", "layer_name", "_do_torchao_reload", "_original_do_torchao_reload"}
_LEAVES = int | float | bool | str | None


def list_state(model: nn.Module) -> dict[str, Any]:
    """Tensors and plain values by the path that leads to them, from each module of the model."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state |= dict(_walk(name, vars(module), {id(module)}))
    return state


def list_objects(layers: list[nn.Module]) -> dict[str, Any]:
    """Objects of vLLM below layers, by the number of the layer and the path that leads to them."""
    objects: dict[str, Any] = {}
    for number, layer in enumerate(layers):
        list(_walk(str(number), vars(layer), {id(layer)}, objects))
    return objects


def _walk(path: str, value: Any, visited: set[int], objects: dict[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | _LEAVES):
        yield path, value
        return
    if isinstance(value, nn.Module | enum.Enum | type) or id(value) in visited:
        return
    visited = visited | {id(value)}
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items() if key not in _BOOKKEEPING]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    elif type(value).__module__.startswith("vllm.model_executor") and hasattr(value, "__dict__"):
        items = list(vars(value).items())
        if objects is not None:
            objects[path] = value
    else:
        return
    for key, item in items:
        yield from _walk(f"{path}.{key}", item, visited, objects)
