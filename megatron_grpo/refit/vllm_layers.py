"""What vLLM's layers compute with beside their plain weights, and how it is made anew when these have changed."""

from __future__ import annotations

from typing import Any

import torch

from megatron_grpo.refit.layer_memory import LayerMemory


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
