"""Weights that stay in host memory and are on the device only while they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_grpo.platform.device import current_platform


class OffloadedWeights:
    """The frozen weights of a model, in host memory; pinned where there is a GPU, which copies from there directly.

    They are never copied back: whoever changes them does so in host memory, where they are outside of `on_device`.

    Args:
        chunks: the model, whose parameters are moved to host memory.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        for parameter in self._parameters:
            host = parameter.data.cpu()
            parameter.data = host.pin_memory() if current_platform().name == "cuda" else host

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The weights on the platform's device, within the body."""
        device = current_platform().device
        hosted = [parameter.data for parameter in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.data = parameter.data.to(device, non_blocking=True)
            yield
        finally:
            for parameter, host in zip(self._parameters, hosted, strict=True):
                parameter.data = host
