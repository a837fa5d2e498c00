"""What vLLM's layers on a CPU keep beside their weights, and how it is made anew when these have changed."""

from __future__ import annotations

import torch


def forget_packed_experts(module: torch.nn.Module) -> None:
    """Let vLLM pack the weights of experts again once they are loaded.

    On a CPU experts are multiplied by packed copies. vLLM packs what it loads only where it makes a layer's kernel, and
    takes a kernel that is there for one whose weights need no packing.
    """
    for layer in module.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Let heads that are tied to the embedding see its new weights.

    On a CPU every layer multiplies by a packed copy of its weight, made when the layer is loaded; such a head never is.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
