"""vLLM's own loading, a tensor at a time: what came is written at once, and none of it is kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from megatron_grpo.refit.layer_memory import LayerMemory
from megatron_grpo.refit.vllm_layers import RebuiltLayer, finish_model, is_derived


class TensorwiseLoading:
    """Lets the weights of a model be loaded again.

    vLLM's reloading keeps the tensors of a layer until all of them have come: with experts, those of all ranks.

    Args:
        model: vLLM's.
        dtype: of its activations.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        layers = [layer for layer in model.modules() if is_derived(layer)]
        self._memory = LayerMemory(layers)
        self._layers = [_LoadedLayer(layer, self._memory) for layer in layers]

    def begin(self) -> None:
        """Let the loaders of layers that are rebuilt write to plain weights."""
        for layer in self._layers:
            layer.begin()

    def finish(self) -> None:
        """Let the model compute with what was loaded."""
        for layer in self._layers:
            layer.finish()
        finish_model(self._model, self._dtype, self._memory)

    def abandon(self) -> None:
        """Put back what layers had before that are not complete."""
        for layer in self._layers:
            layer.abandon()


class _LoadedLayer:
    """A layer that vLLM makes its own form of as soon as all of its plain weights are there."""

    def __init__(self, layer: torch.nn.Module, memory: LayerMemory) -> None:
        self._layer, self._rebuilt = layer, RebuiltLayer(layer, memory)
        self._loaders: list[tuple[Any, Callable[..., Any]]] = []
        """(parameter, its own loader) while the layer is open."""
        self._missing = self._loaded = 0

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
        from vllm.model_executor.model_loader.reload.utils import get_layer_size, get_layer_tensors

        tensors = get_layer_tensors(self._rebuilt.strip())
        self._missing, self._loaded = get_layer_size(self._layer), 0
        for name, tensor in tensors.items():
            if name not in SKIP_LOAD_TENSORS:
                loader = _get_original_loader(tensor)
                self._loaders.append((tensor, loader))
                tensor.weight_loader = self._writing(name, loader)

    def finish(self) -> None:
        """Rebuild a layer that has padding, which nobody sends; leave one as it was for which nothing came."""
        if self._loaders and self._loaded:
            self._close()
        self.abandon()

    def abandon(self) -> None:
        self._give_loaders_back()
        self._rebuilt.abandon()

    def _writing(self, name: str, loader: Callable[..., Any]) -> Callable[..., Any]:
        """A loader that writes to the layer's own parameter, whose place another without memory takes at first."""
        from vllm.model_executor.model_loader.reload.meta import get_numel_loaded

        signature = inspect.signature(loader)

        @wraps(loader, assigned=("__doc__", "__annotations__"))
        def load(*args: Any, **kwargs: Any) -> Any:
            if not self._loaders:  # the layer is complete: this is of experts that another rank has
                return loader(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.arguments["param"] = getattr(self._rebuilt.opened(), name)
            count, result = get_numel_loaded(loader, bound)
            self._missing -= count
            self._loaded += count
            if not self._missing:
                self._close()
            return result

        return load

    def _close(self) -> None:
        self._give_loaders_back()
        self._rebuilt.close()

    def _give_loaders_back(self) -> None:
        for tensor, loader in self._loaders:
            tensor.weight_loader = loader
        self._loaders.clear()
