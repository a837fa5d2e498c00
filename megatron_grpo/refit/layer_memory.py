"""What layers of vLLM that are rebuilt take of a CPU's memory: little more than they need at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_grpo.platform.freed_memory import FreedMemory
from megatron_grpo.platform.reused_memory import ReusedMemory


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
