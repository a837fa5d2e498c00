"""Runs in an engine's worker: loads layers of vLLM's model again after it has converted their weights.

vLLM converts the weights of many layers when it has loaded them: to blocks of FP8, to the layout of a kernel for
experts, to packed copies on a CPU. A refit brings the weights as a checkpoint has them (*plain* weights here). So a
layer is given plain parameters again, they are filled, vLLM converts them, and the result is copied into the memory
that the layer had before, which CUDA graphs have captured. Whole tensors go through vLLM's own layerwise reloading
(`ModelReload`). For slices its steps are called one by one (`RebuiltLayer`), because vLLM has no loaders for them.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_grpo.platform.device import detect_platform
from megatron_grpo.weight_sync.boxes import Box, Ranges, count_elements
from megatron_grpo_kernels.fp8_format import BLOCK, count_blocks

# Packages whose objects are looked into. Any other object has to stay the same, or be equal.
_PACKAGES = ("vllm.model_executor.", "flashinfer.", "deep_gemm.", "humming.")
# Attributes of every module of torch; parameters and buffers are among them.
_OF_MODULES = frozenset(vars(nn.Module()))


class KernelState:
    """What a layer's kernel holds beside parameters; on CPUs nothing.

    These are objects of the layer and of its quantisation method, without parameters and buffers, which vLLM's own
    reloading keeps. In each conversion vLLM makes kernels, their settings of quantisation, strides, locks and
    workspaces anew. CUDA graphs have captured the addresses of the tensors that were there first, and read those. So
    the first objects stay on the layer, and their tensors get the values of the new ones. There are no graphs on CPUs,
    and kernels that keep packed weights have to be made anew there.
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


class ModelReload:
    """Loads whole tensors into a worker's model, in any order, with vLLM's loaders."""

    def __init__(self, worker: Any) -> None:
        self._model = worker.model_runner.get_model()
        require_plain(self._model)
        self._config = worker.vllm_config.model_config
        self._layers = [layer for _, layer in iterate_refitted(self._model, worker.boxes) if is_derived(layer)]
        # (quant_method, deleted kernel) of each converted layer; None: no kernel was deleted (`delete_kernel`).
        self._kernels: list[tuple[Any, Any]] = []
        self._states: list[KernelState] = []

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._states = [KernelState(layer) for layer in self._layers]
        for layer in self._layers:
            self._kernels.append((layer.quant_method, delete_kernel(layer)))
            initialize_layerwise_reload(layer)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors, (name, [...]), which vLLM keeps until a layer is complete."""
        splits = type(self._model).__name__ == "GptOssForCausalLM"
        self._model.load_weights(split_experts(tensors) if splits else tensors)

    def finish(self) -> None:
        """Convert incomplete layers, too, since padding is never sent."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for layer in self._layers:
            finalize_layerwise_reload(layer, self._config)
        for state in self._states:
            state.keep()
        self._restore_kernels()
        finish_model(self._model, self._config.dtype)

    def abandon(self) -> None:
        """Restore the previous weights of incomplete layers."""
        for layer in self._layers:
            RebuiltLayer(layer).abandon()
        for state in self._states:
            state.put_back()
        self._restore_kernels()

    def _restore_kernels(self) -> None:
        for method, kernel in self._kernels:
            if kernel is not None and method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels.clear()
        self._states.clear()


# Parameters of vLLM's gpt-oss, by the tensors of all experts that they are loaded from.
_STACKED = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


def split_experts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Split gpt-oss's tensors of all experts by expert.

    The names are those that vLLM has for one expert's tensors. During a reload vLLM copies tensors of all experts into
    parameters that hold nothing; those of one expert go through its loaders.
    """
    for name, tensor in tensors:
        block, _, last = name.rpartition(".mlp.experts.")
        if not block:
            yield name, tensor
            continue
        for expert, part in enumerate(tensor):
            yield f"{block}.mlp.experts.{expert}.{_STACKED[last]}", part


def iterate_refitted(model: nn.Module, boxes: Sequence[Box]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, without those of a vision tower that no box fills."""
    read_mapping: Any = getattr(model, "get_mm_mapping", None)
    mapping = None if read_mapping is None else read_mapping()
    parts = () if mapping is None else tuple(filter(None, [*mapping.tower_model, *mapping.connector]))
    frozen = () if any(box.tensor and box.parameter.startswith(parts) for box in boxes) else parts
    return ((name, module) for name, module in model.named_modules() if not f"{name}.".startswith(frozen))


def is_derived(layer: torch.nn.Module) -> bool:
    """True for a layer that computes with converted weights."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    if method is None or isinstance(method, UnquantizedEmbeddingMethod) or _has_plain_experts(method):
        return False
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in layer.parameters())
    is_packed = is_on_cpu and getattr(layer, "cpu_linear", None) is not torch.nn.functional.linear
    return is_packed or not isinstance(method, UnquantizedLinearMethod)


def has_converted_layers(model: nn.Module) -> bool:
    """True if layers on a GPU have plain weights only during a refit."""
    on_gpu = (layer for layer in model.modules() if any(parameter.is_cuda for parameter in layer.parameters()))
    return any(map(is_derived, on_gpu))


def _has_plain_experts(method: Any) -> bool:
    # vLLM's kernel of experts for Hopper, in Triton, computes with the weights as they were loaded. Converting them
    # would allocate each layer a second time.
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    is_plain = isinstance(method, UnquantizedFusedMoEMethod)
    return is_plain and method.unquantized_backend is UnquantizedMoeBackend.TRITON


def require_plain(model: nn.Module) -> None:
    """Raise ValueError unless layers that are filled in place have plain weights."""
    # vLLM's kernels rewrite the weights of many layers after loading, of more in every release. Layers with a
    # quantisation method and all experts are converted by vLLM again, so only the others may be written to directly.
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    rewritten = []
    for module, layer in model.named_modules():
        if is_derived(layer):
            continue
        for name, plain in get_layerwise_info(layer).restore_metadata[0].items():
            current = getattr(layer, name, None)
            if current is None or (current.shape, current.dtype) != (plain.shape, plain.dtype):
                change = "is gone" if current is None else f"is {list(current.shape)} in {current.dtype}"
                rewritten.append(f"{module}.{name} was {list(plain.shape)} in {plain.dtype} and {change}")
    if rewritten:
        raise ValueError(f"vLLM has rewritten weights that a refit writes in place: {'; '.join(rewritten)}")


class RebuiltLayer:
    """A layer whose weights vLLM converts after loading.

    `fp8_parameters` are filled with FP8 blocks and scales.
    """

    def __init__(self, layer: torch.nn.Module, fp8_parameters: Iterable[str] = ()) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._layer: Any = layer
        self._fp8_parameters = sorted(fp8_parameters)
        self._reload: Any = layerwise
        self._info = layerwise.get_layerwise_info(layer)
        self._state: KernelState | None = None  # while the layer is converted

    def restore_plain(self) -> Any:
        """Give the layer plain parameters without storage until `abandon`, and return it."""
        info, layer = self._info, self._layer
        if info.restore_metadata[0]:  # empty for a model that vLLM has not loaded: its parameters are plain
            info.kernel_tensors = self._reload.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            self._reload.restore_layer_on_meta(layer, info)
        return layer

    def open(self) -> Any:
        """Give the layer plain weights, unless it has them already, and return it."""
        info, layer = self._info, self._layer
        if info.kernel_tensors is None:
            self.restore_plain()
            for name in self._fp8_parameters:  # vLLM may load wider weights and round them
                shape = getattr(layer, name).shape
                values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
                blocks = (*shape[:-2], *map(count_blocks, shape[-2:]))
                scales = torch.empty(blocks, dtype=torch.float32, device="meta")
                for parameter, meta in ((name, values), (name_scales(name), scales)):
                    layer.register_parameter(parameter, nn.Parameter(meta, requires_grad=False))
            self._reload.materialize_layer(layer, info)
        return layer

    def close(self) -> None:
        """Convert the plain weights into the memory of the previous ones."""
        layer = self._layer
        if hasattr(layer, "_already_called_process_weights_after_loading"):
            del layer._already_called_process_weights_after_loading
        self._state = KernelState(layer)
        delete_kernel(layer)
        if self._fp8_parameters:
            self._convert_blocks()
        else:
            layer.quant_method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            layer.update_param_tp_status()
        self._state.keep()
        self._state = None
        self._reload._copy_and_restore_kernel_tensors(layer, self._info)
        self._info.reset()

    def abandon(self) -> None:
        if self._state is not None:
            self._state.put_back()
            self._state = None
        if self._info.kernel_tensors is not None:
            self._reload._place_kernel_tensors(self._layer, self._info)
            self._info.reset()

    def _convert_blocks(self) -> None:
        # vLLM's methods for online quantisation round first; only their steps after the rounding run here.
        from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
        from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

        layer, method = self._layer, self._layer.quant_method
        untyped: Any = method
        if isinstance(method, OnlineLinearBase):
            layer.input_scale = None
            untyped.fp8_linear.process_weights_after_loading(layer)
        elif isinstance(method, OnlineMoEMethodBase):
            names = ("w13_weight", "w2_weight")
            parameters = [getattr(layer, name) for name in (*names, *map(name_scales, names))]
            untyped._setup_kernel(layer, *parameters, None, None)
        else:
            method.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True


def name_scales(parameter: str) -> str:
    """Name the block scales of a parameter as vLLM does."""
    return f"{parameter}_scale_inv"


def uses_fp8_blocks(layer: nn.Module) -> bool:
    method: Any = getattr(layer, "quant_method", None)
    size = getattr(method, "weight_block_size", None)
    return size is not None and tuple(size) == (BLOCK, BLOCK)


def list_unsent(model: nn.Module, boxes: Iterable[Box]) -> list[Tensor]:
    """List the tensors of a model that no refit fills, buffers apart.

    Those are rows after all boxes, such as the padding of an embedding, other parameters with elements outside of
    boxes, and what layers and kernels hold beside parameters, such as strides. vLLM keeps buffers of sleeping engines.
    """
    filled = defaultdict[str, list[Ranges]](list)
    tensors, paddings, excluded = list[Tensor](), list[Tensor](), set[int]()
    for box in boxes:
        if box.constant is None:  # else the loader fills it once
            filled[box.parameter].append(box.layout.parameter)
    for module, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            ranges = filled[f"{module}.{name}"]
            # A conversion makes all elements of a layer's parameters.
            padding = [] if ranges and is_derived(layer) else _list_padding(parameter.data, ranges)
            if padding is None:
                tensors.append(parameter.data)
            else:
                excluded.add(parameter.untyped_storage().data_ptr())
                paddings += padding
        tensors += [value for _, value in _walk("", layer, lambda _: None) if isinstance(value, Tensor)]
    excluded |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    device, unsent = next(model.parameters()).device, dict[Any, Tensor]()
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if tensor.device == device and address not in excluded:
            unsent.setdefault((address, tensor.storage_offset(), tensor.shape, tensor.stride()), tensor)
    return [*unsent.values(), *paddings]


def _list_padding(parameter: Tensor, ranges: Sequence[Ranges]) -> list[Tensor] | None:
    """List the rows after those that boxes fill; None: boxes leave out more."""
    elements = sum(map(count_elements, ranges))
    if elements == parameter.numel():
        return []
    rows = max((indices[0].end for indices in ranges), default=0)
    return [parameter[rows:]] if rows and elements == rows * math.prod(parameter.shape[1:]) else None


def finish_model(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute weights that attention, tied heads and Mamba derive from others'."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    is_on_cpu = next(model.parameters()).device.type == "cpu"
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(dtype)
        elif is_on_cpu and isinstance(layer, ParallelLMHead):
            # A head multiplies by a packed copy of its weight, and a head tied to the embedding is never loaded itself.
            layer.quant_method.process_weights_after_loading(layer)
        elif is_on_cpu and hasattr(layer, "conv_weights"):
            # Mamba computes with the memory that the kernels of its convolution had before vLLM packed them.
            loaded = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
            if loaded is not None:
                layer.conv_weights.copy_(loaded)


def delete_kernel(layer: torch.nn.Module) -> Any:
    """Delete and return the kernel of experts on a CPU."""
    # vLLM packs the weights of experts only when it creates the layer's kernel, and skips that while there is a kernel.
    # On a GPU kernels stay (`KernelState`).
    method: Any = getattr(layer, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    if detect_platform().name == "cuda" or kernel is None:
        return None
    method.moe_kernel = None
    return kernel
