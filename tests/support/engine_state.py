"""All tensors and numbers that a model of vLLM holds, wherever it keeps them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_BOOKKEEPING = {"_modules", "_forward_pre_hooks", "_forward_hooks", "training", "prefix", "layer_name"}
_LEAVES = (int, float, bool, str, type(None))


def list_state(model: nn.Module) -> dict[str, Any]:
    """Tensors and plain values by the path that leads to them, from each module of the model."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        for path, value in _walk(name, vars(module), {id(module)}):
            state[path] = value
    return state


def _walk(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) or isinstance(value, _LEAVES):
        yield path, value
        return
    if isinstance(value, nn.Module | enum.Enum | type) or id(value) in seen:
        return
    seen = seen | {id(value)}
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items() if key not in _BOOKKEEPING]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    elif type(value).__module__.startswith("vllm.model_executor") and hasattr(value, "__dict__"):
        items = [(key, item) for key, item in vars(value).items()]
    else:
        return
    for key, item in items:
        yield from _walk(f"{path}.{key}", item, seen)
