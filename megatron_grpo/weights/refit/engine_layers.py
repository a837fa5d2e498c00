"""What vLLM's layers compute with beside their plain weights, and how it is made anew when these have changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn

from megatron_grpo.cpu.host_memory import FreedMemory, ReusedMemory
from megatron_grpo_kernels.fp8_blocks import WEIGHT_BLOCK, scales_shape


class LayerMemory:
    """The memory of layers' plain weights, which come and go, and that of vLLM's form of them, made anew each time.

    In one heap they would leave holes between them, together as large as all matrices. So plain weights are elsewhere.
    Devices have allocators that do as much.

    Args:
        layers: vLLM's that will be rebuilt, as its loader has left them.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        weights = [one for layer in layers for one in get_layerwise_info(layer).restore_metadata[0].values()]
        nbytes = sum(one.numel() * one.element_size() for one in weights)
        devices = {parameter.device.type for layer in layers for parameter in layer.parameters()}
        on_cpu = devices == {"cpu"}
        self._plain = ReusedMemory(nbytes) if on_cpu else None
        self._freed = FreedMemory() if on_cpu else None

    def plain(self) -> AbstractContextManager[object]:
        """Within it, a layer gets the memory of its plain weights."""
        return nullcontext() if self._plain is None else self._plain

    def derived(self) -> None:
        """To be called when vLLM has made its form of a layer anew."""
        if self._freed is not None:
            self._freed.bound()


def is_derived(layer: torch.nn.Module) -> bool:
    """Whether a layer computes with something else than its plain weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if method is None or isinstance(method, UnquantizedEmbeddingMethod):
        return False
    on_cpu = all(parameter.device.type == "cpu" for parameter in layer.parameters())
    packed = on_cpu and getattr(layer, "cpu_linear", None) is not torch.nn.functional.linear
    return packed or not isinstance(method, UnquantizedLinearMethod)


class RebuiltLayer:
    """A layer that vLLM makes its own form of: experts and quantised layers, and on a CPU all that it packs.

    Args:
        layer: vLLM's.
        memory: where the model's rebuilt layers have their plain weights; told when vLLM has made its form of them.
    """

    def __init__(self, layer: torch.nn.Module, memory: LayerMemory) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._layer: Any = layer
        self._memory = memory
        self._reload: Any = layerwise
        self._info = layerwise.get_layerwise_info(layer)
        self._has_memory = False

    def strip(self) -> Any:
        """The layer, with plain weights that have no memory yet."""
        info, layer = self._info, self._layer
        info.kernel_tensors = self._reload.get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        self._reload.restore_layer_on_meta(layer, info)
        return layer

    def opened(self) -> Any:
        """The layer, with plain weights to write to."""
        if self._info.kernel_tensors is None:
            self.strip()
        if not self._has_memory:
            with self._memory.plain():
                self._reload.materialize_layer(self._layer, self._info)
            self._has_memory = True
        return self._layer

    def close(self) -> None:
        """Let vLLM make its form of the plain weights, in the memory of what was there before."""
        layer = self._layer
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        forget_packed(layer)
        self._process()
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()
        self._reload._copy_and_restore_kernel_tensors(layer, self._info)
        self._forget()
        self._memory.derived()

    def abandon(self) -> None:
        """Put back what was there before, if the layer is open."""
        if self._info.kernel_tensors is not None:
            self._reload._place_kernel_tensors(self._layer, self._info)
            self._forget()

    def _process(self) -> None:
        self._layer.quant_method.process_weights_after_loading(self._layer)

    def _forget(self) -> None:
        self._info.reset()
        self._has_memory = False


def forget_packed(module: torch.nn.Module) -> None:
    """Let vLLM pack weights again once they are loaded, and the memory of the old packed ones be theirs.

    On a CPU layers multiply by packed copies. Those of experts vLLM packs only where it makes a layer's kernel, and
    takes a kernel that is there for one whose weights need no packing.
    """
    for layer in module.modules():
        if hasattr(layer, "cpu_linear"):
            del layer.cpu_linear
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def finish_model(model: torch.nn.Module, dtype: torch.dtype, memory: LayerMemory) -> None:
    """Let attention and tied heads make what they derive from weights of other layers.

    Args:
        model: vLLM's, its layers rebuilt.
        dtype: of its activations.
        memory: where the model's rebuilt layers have their plain weights; told of each head that is packed anew.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            attention: Any = layer
            attention.process_weights_after_loading(dtype)
    if next(model.parameters()).device.type == "cpu":
        _repack_heads(model, memory)


def _repack_heads(model: torch.nn.Module, memory: LayerMemory) -> None:
    """Let heads that are tied to the embedding see its new weights.

    On a CPU every layer multiplies by a packed copy of its weight, made when the layer is loaded; such a head never is.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            forget_packed(module)
            module.quant_method.process_weights_after_loading(module)
            memory.derived()


def scales_name(parameter: str) -> str:
    """What vLLM calls the scales of a parameter in blocks."""
    return f"{parameter}_scale_inv"


def keeps_blocks(layer: nn.Module) -> bool:
    """Whether vLLM computes with such blocks in a layer, read from a checkpoint or rounded when it loads."""
    method: Any = getattr(layer, "quant_method", None)
    size = getattr(method, "weight_block_size", None)
    return size is not None and tuple(size) == WEIGHT_BLOCK


class BlockedLayer(RebuiltLayer):
    """Such a layer, whose plain weights are numbers and scales as a checkpoint in FP8 has them.

    Args:
        layer: vLLM's.
        memory: where the model's rebuilt layers have their plain weights; told when vLLM has made its form of them.
        parameters: names of those that come in FP8.
    """

    def __init__(self, layer: nn.Module, memory: LayerMemory, parameters: Iterable[str]) -> None:
        super().__init__(layer, memory)
        self._parameters = sorted(parameters)

    def strip(self) -> Any:
        """The layer, with plain weights that have no memory yet, in FP8 also where vLLM would read wider ones."""
        layer = super().strip()
        for name in self._parameters:
            shape = getattr(layer, name).shape
            scales = (*shape[:-2], *scales_shape(shape[-2:], WEIGHT_BLOCK))
            _register(layer, name, torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"))
            _register(layer, scales_name(name), torch.empty(scales, dtype=torch.float32, device="meta"))
        return layer

    def _process(self) -> None:
        from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
        from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

        layer, method = self._layer, self._layer.quant_method
        if isinstance(method, OnlineLinearBase):  # what it does behind its own rounding
            layer.input_scale = None
            kernel: Any = method
            kernel.fp8_linear.process_weights_after_loading(layer)
        elif isinstance(method, OnlineMoEMethodBase):
            numbers = [getattr(layer, name) for name in ("w13_weight", "w2_weight")]
            scales = [getattr(layer, scales_name(name)) for name in ("w13_weight", "w2_weight")]
            experts: Any = method
            experts._setup_kernel(layer, *numbers, *scales, None, None)
        else:
            super()._process()
        layer._already_called_process_weights_after_loading = True


def _register(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


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
