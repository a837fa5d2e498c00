"""Runs in an engine's worker: lets one layer of vLLM's model be loaded again after vLLM has converted its weights.

vLLM converts the weights of many layers when it has loaded them: to blocks of FP8, to the layout of a kernel for
experts, to packed copies on a CPU. A refit brings the weights as a checkpoint has them (*plain* weights here). So a
layer is given plain parameters again, they are filled, vLLM converts them, and the result is copied into the memory
that the layer had before, which CUDA graphs have captured. The steps are those of vLLM's own layerwise reloading,
called one by one: vLLM's `initialize_layerwise_reload` keeps references to all tensors of a layer until the last one
has come, and the tensors of a refit are views of a receive buffer that the next bucket overwrites; of experts it would
keep those of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn

from megatron_grpo.platform.device import current_platform
from megatron_grpo_kernels.fp8_blocks import WEIGHT_BLOCK, scales_shape


class TensorwiseLoading:
    """Reloads a whole model through vLLM's `load_weights`, one tensor at a time, in any order.

    Args:
        model: vLLM's.
        dtype: of its activations.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._layers = [_LoadedLayer(layer) for layer in model.modules() if is_derived(layer)]

    def begin(self) -> None:
        """Let the weight loaders of converted layers write to plain weights."""
        for layer in self._layers:
            layer.begin()

    def finish(self) -> None:
        """Convert the layers that are still open, so that the model computes with what was loaded."""
        for layer in self._layers:
            layer.finish()
        finish_model(self._model, self._dtype)

    def abandon(self) -> None:
        """Restore the previous weights of incomplete layers."""
        for layer in self._layers:
            layer.abandon()


def is_derived(layer: torch.nn.Module) -> bool:
    """Whether a layer computes with a converted form of its weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if method is None or isinstance(method, UnquantizedEmbeddingMethod):
        return False
    on_cpu = all(parameter.device.type == "cpu" for parameter in layer.parameters())
    packed = on_cpu and getattr(layer, "cpu_linear", None) is not torch.nn.functional.linear
    return packed or not isinstance(method, UnquantizedLinearMethod)


class RebuiltLayer:
    """A layer whose weights vLLM converts: experts, quantised layers, and on a CPU every packed layer.

    Args:
        layer: vLLM's.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._layer: Any = layer
        self._reload: Any = layerwise
        self._info = layerwise.get_layerwise_info(layer)
        self._materialized = False

    def strip(self) -> Any:
        """The layer, with plain weights on the meta device."""
        info, layer = self._info, self._layer
        info.kernel_tensors = self._reload.get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        self._reload.restore_layer_on_meta(layer, info)
        return layer

    def open(self) -> Any:
        """The layer, with plain weights that can be written to."""
        if self._info.kernel_tensors is None:
            self.strip()
        if not self._materialized:
            self._reload.materialize_layer(self._layer, self._info)
            self._materialized = True
        return self._layer

    def close(self) -> None:
        """Convert the plain weights, and copy the result into the memory of the previous ones."""
        layer = self._layer
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        _forget_packed(layer)
        self._convert()
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()
        self._reload._copy_and_restore_kernel_tensors(layer, self._info)
        self._reset()

    def abandon(self) -> None:
        """Restore the previous weights if the layer is open."""
        if self._info.kernel_tensors is not None:
            self._reload._place_kernel_tensors(self._layer, self._info)
            self._reset()

    def _convert(self) -> None:
        self._layer.quant_method.process_weights_after_loading(self._layer)

    def _reset(self) -> None:
        self._info.reset()
        self._materialized = False


class BlockedLayer(RebuiltLayer):
    """A layer in FP8 blocks, filled with numbers and scales as a checkpoint in FP8 has them.

    Args:
        layer: vLLM's.
        parameters: names of the parameters that come in FP8.
    """

    def __init__(self, layer: nn.Module, parameters: Iterable[str]) -> None:
        super().__init__(layer)
        self._parameters = sorted(parameters)

    def strip(self) -> Any:
        """The layer, with plain weights on the meta device: FP8 also where vLLM would load wider ones and round
        them."""
        layer = super().strip()
        for name in self._parameters:
            shape = getattr(layer, name).shape
            scales = (*shape[:-2], *scales_shape(shape[-2:], WEIGHT_BLOCK))
            plain = {name: (shape, torch.float8_e4m3fn), scales_name(name): (scales, torch.float32)}
            for one, (size, dtype) in plain.items():
                meta = torch.empty(size, dtype=dtype, device="meta")
                layer.register_parameter(one, nn.Parameter(meta, requires_grad=False))
        return layer

    def _convert(self) -> None:
        # vLLM's methods for online quantisation round first; only the steps behind their rounding are run here.
        from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
        from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

        layer, method = self._layer, self._layer.quant_method
        if isinstance(method, OnlineLinearBase):
            layer.input_scale = None
            kernel: Any = method
            kernel.fp8_linear.process_weights_after_loading(layer)
        elif isinstance(method, OnlineMoEMethodBase):
            numbers = [getattr(layer, name) for name in ("w13_weight", "w2_weight")]
            scales = [getattr(layer, scales_name(name)) for name in ("w13_weight", "w2_weight")]
            experts: Any = method
            experts._setup_kernel(layer, *numbers, *scales, None, None)
        else:
            super()._convert()
        layer._already_called_process_weights_after_loading = True


def scales_name(parameter: str) -> str:
    """vLLM's name for the block scales of a parameter."""
    return f"{parameter}_scale_inv"


def keeps_blocks(layer: nn.Module) -> bool:
    """Whether a layer computes with FP8 blocks of `WEIGHT_BLOCK`, loaded as such or rounded by vLLM."""
    method: Any = getattr(layer, "quant_method", None)
    size = getattr(method, "weight_block_size", None)
    return size is not None and tuple(size) == WEIGHT_BLOCK


def finish_model(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute what attention layers and tied heads derive from the weights of other layers.

    Args:
        model: vLLM's, its layers rebuilt.
        dtype: of its activations.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    on_cpu = next(model.parameters()).device.type == "cpu"
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            attention: Any = layer
            attention.process_weights_after_loading(dtype)
        elif on_cpu and isinstance(layer, ParallelLMHead):
            # A head multiplies by a packed copy of its weight, and one that is tied to the embedding is never loaded.
            _forget_packed(layer)
            layer.quant_method.process_weights_after_loading(layer)


def _forget_packed(layer: torch.nn.Module) -> None:
    """Delete a layer's packed copies, which vLLM makes on a CPU, so that they are made of the new weights.

    vLLM packs the weights of experts only when it creates the layer's kernel, and skips that while there is a kernel.
    On a GPU kernels stay: captured CUDA graphs read the tensors that they hold.
    """
    if current_platform().name == "cuda":
        return
    for module in layer.modules():
        if hasattr(module, "cpu_linear"):
            del module.cpu_linear
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class _LoadedLayer(RebuiltLayer):
    """A layer that is converted as soon as vLLM's weight loaders have filled all of its plain weights."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__(layer)
        self._loaders: list[tuple[Any, Callable[..., Any]]] = []
        """(parameter, its own loader) while the layer is open."""
        self._missing = self._loaded = 0

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
        from vllm.model_executor.model_loader.reload.utils import get_layer_size, get_layer_tensors

        tensors = get_layer_tensors(self.strip())
        self._missing, self._loaded = get_layer_size(self._layer), 0
        for name, tensor in tensors.items():
            if name not in SKIP_LOAD_TENSORS:
                loader = _get_original_loader(tensor)
                self._loaders.append((tensor, loader))
                tensor.weight_loader = self._counting(name, loader)

    def finish(self) -> None:
        """Convert a layer with padding, which is never sent; restore a layer for which nothing came."""
        if self._loaders and self._loaded:
            self.close()
        self.abandon()

    def close(self) -> None:
        self._restore_loaders()
        super().close()

    def abandon(self) -> None:
        self._restore_loaders()
        super().abandon()

    def _counting(self, name: str, loader: Callable[..., Any]) -> Callable[..., Any]:
        """A loader that writes to the materialized parameter instead of the one on meta, and counts the numbers."""
        from vllm.model_executor.model_loader.reload.meta import get_numel_loaded

        signature = inspect.signature(loader)

        @wraps(loader, assigned=("__doc__", "__annotations__"))
        def load(*args: Any, **kwargs: Any) -> Any:
            if not self._loaders:  # the layer is complete: the tensor belongs to an expert of another rank
                return loader(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.arguments["param"] = getattr(self.open(), name)
            count, result = get_numel_loaded(loader, bound)
            self._missing -= count
            self._loaded += count
            if not self._missing:
                self.close()
            return result

        return load

    def _restore_loaders(self) -> None:
        for tensor, loader in self._loaders:
            tensor.weight_loader = loader
        self._loaders.clear()
