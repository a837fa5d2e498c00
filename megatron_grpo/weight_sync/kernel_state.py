"""Runs in an engine's worker: keeps the objects of vLLM's kernels while a layer on a GPU is converted again.

In each conversion vLLM makes kernels, their settings of quantisation, strides, locks and workspaces anew. CUDA graphs
have captured the addresses of the tensors that were there first, and read those. So the first objects stay on the
layer, and their tensors get the values of the new ones. Parameters and buffers are kept by vLLM's own reloading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from megatron_grpo.platform.device import detect_platform

# Packages whose objects are looked into. Any other object has to stay the same, or be equal.
_PACKAGES = ("vllm.model_executor.", "flashinfer.", "deep_gemm.", "humming.")
# Attributes of every module of torch; parameters and buffers are among them.
_OF_MODULES = frozenset(vars(nn.Module()))


class KernelState:
    """What a layer's kernel holds beside parameters; on CPUs nothing.

    These are objects of the layer and of its quantisation method, without parameters and buffers. There are no graphs
    on CPUs, and kernels that keep packed weights have to be made anew there.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._attributes: dict[int, tuple[Any, dict[str, Any]]] = {}  # by the identity of their object
        self._values: dict[str, Any] = {}
        if detect_platform().name == "cuda":
            self._values = dict(_walk("", layer, self._record))

    def keep(self) -> None:
        """Put the first objects back, with a conversion's values.

        Raises:
            ValueError: a conversion has changed what graphs have captured in another way than by a tensor's values.
        """
        converted = dict(_walk("", self._layer, lambda _: None)) if self._values else {}
        copies, changes = [], []
        for path, first in self._values.items():
            current = converted.get(path)
            if isinstance(first, Tensor) and isinstance(current, Tensor) and _are_alike(first, current):
                copies += [(first, current)] if first.data_ptr() != current.data_ptr() else []
            elif not _are_equal(first, current):
                changes.append(path)
        if changes:
            text = f"its conversion has changed {', '.join(changes[:3])} ({len(changes)} in all)"
            raise ValueError(
                f"vLLM's kernel of a layer ({type(self._layer).__name__}) cannot be refitted, since {text}, which CUDA "
                "graphs have captured; choose another by generation.engine_args.moe_backend or linear_backend"
            )
        for first, current in copies:
            first.data.copy_(current)
        self.put_back()

    def put_back(self) -> None:
        """Put the first objects back, whatever values their tensors have."""
        for instance, attributes in self._attributes.values():
            vars(instance).update(attributes)

    def _record(self, instance: Any) -> None:
        attributes = {name: value for name, value in vars(instance).items() if name not in _OF_MODULES}
        self._attributes[id(instance)] = (instance, attributes)


def _walk(
    path: str, value: Any, visit: Callable[[Any], None], above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers and closed objects by path.

    Each object that is looked into is visited."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    is_open = hasattr(value, "__dict__") and type(value).__module__.startswith(_PACKAGES)
    # All layers share the settings of quantisation, which count the time of conversions.
    if not above or (is_open and not isinstance(value, nn.Module | Tensor | QuantizationConfig)):
        visit(value)
        items = [(name, item) for name, item in vars(value).items() if name not in _OF_MODULES]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif isinstance(value, functools.partial):
        items = [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    else:
        yield path, value
        return
    for name, item in items:
        if id(item) not in above:
            yield from _walk(f"{path}.{name}" if path else str(name), item, visit, (*above, id(value)))


def _are_alike(first: Tensor, current: Tensor) -> bool:
    """True if one tensor can take the other's values."""
    return (
        all(getattr(first, name) == getattr(current, name) for name in ("shape", "dtype", "device"))
        and first.stride() == current.stride()
    )


def _are_equal(first: Any, current: Any) -> bool:
    if first is current or isinstance(first, Tensor) or isinstance(current, Tensor):
        return first is current
    return bool(type(first) is type(current) and first == current)
