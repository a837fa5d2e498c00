"""What a rank keeps on its device between steps, given up while others need the device and taken back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_grpo.platform.device import current_platform

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import ModelRank


logger = logging.getLogger(__name__)

Storages = dict[int, torch.UntypedStorage]
"""Storages by the address of torch's object, which is theirs as long as they are held."""


class DeviceMemory:
    """The memory of a rank's model on its device: the weights, and what only training needs.

    It is given up storage by storage: a storage then has no bytes, and stays what its tensors refer to. So views of
    Megatron's flat buffers, parameters among them, are right again when the bytes are back, and nobody has to be told.

    Args:
        rank: whose memory it is.
    """

    def __init__(self, rank: ModelRank) -> None:
        self._rank = rank
        self._emptied: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """Storages that were given up, with their bytes."""
        self._hosts: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """Host memory of storages, [bytes], uint8; kept while they are on the device, since pinning it takes longer
        than copying."""
        self._without_weights = False

    def require_weights(self) -> None:
        """Stop whoever wants to compute with weights, or read them, when they are not there.

        Raises:
            RuntimeError: they were given up.
        """
        if self._without_weights:
            raise RuntimeError("the weights are in host memory, because engines have the device: it is not their turn")

    @torch.no_grad()
    def give_up(self, *, weights: bool) -> None:
        """Move the optimizer's state to host memory and forget gradients; collective over data-parallel ranks.

        What was given up before stays so.

        Args:
            weights: whether to move the weights too, those of a reference policy on the device among them.
        """
        if self._without_weights:
            return
        self._rank.whole_chunks()  # nobody may still have to fetch updated weights from this rank
        of_weights = _on_device(_weights(self._rank))
        state, gradients = _on_device(_optimizer_state(self._rank)), _on_device(_gradients(self._rank))
        # In float32 what the optimizer updates are the weights themselves.
        moved = {key: one for key, one in state.items() if key not in of_weights} | (of_weights if weights else {})
        forgotten = {key: one for key, one in gradients.items() if key not in state and key not in of_weights}
        for key, storage in moved.items():
            self._host(key, storage).copy_(_bytes(storage), non_blocking=True)
        _finish_copies()
        for key, storage in (moved | forgotten).items():
            self._emptied[key] = storage, storage.nbytes()
            storage.resize_(0)
        self._without_weights = weights
        if current_platform().name == "cuda":
            torch.cuda.empty_cache()
        logger.info("%.1f MiB given up so far", sum(nbytes for _, nbytes in self._emptied.values()) / 2**20)

    @torch.no_grad()
    def take_back(self) -> None:
        """Have everything as it was, gradients aside, which are zero."""
        for key, (storage, nbytes) in self._emptied.items():
            storage.resize_(nbytes)
            if key in self._hosts:
                _bytes(storage).copy_(self._hosts[key][1], non_blocking=True)
            else:
                _bytes(storage).zero_()
        _finish_copies()
        self._hosts = {key: host for key, host in self._hosts.items() if key in self._emptied}
        self._emptied, self._without_weights = {}, False

    def _host(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        """[bytes of the storage], uint8: where its content goes."""
        known = self._hosts.get(key)
        if known is None or known[1].numel() != storage.nbytes():
            pinned = current_platform().name == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._hosts[key] = known = storage, host
        return known[1]


def _weights(rank: ModelRank) -> Iterator[Tensor]:
    """Parameters, flat or not, and buffers of what the rank computes with."""
    for chunk in (*rank.chunks, *(rank.reference or ())):
        yield from chunk.parameters()
        yield from chunk.buffers()
    for buffer in _flat_buffers(rank):
        if buffer.param_data is not None:
            yield buffer.param_data


def _optimizer_state(rank: ModelRank) -> Iterator[Tensor]:
    """Float32 weights, moments and whatever else the optimizers of the chunks keep."""
    for megatron in rank.optimizer.optimizer.chained_optimizers:
        optimizer = getattr(megatron, "optimizer", None)  # a stage without experts has one without any for them
        if optimizer is None:
            continue
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(rank: ModelRank) -> Iterator[Tensor]:
    """The buffers that gradients are summed in, and what was made of them for the last optimizer step."""
    yield from (buffer.grad_data for buffer in _flat_buffers(rank))
    for parameter in _optimizer_state(rank):
        made = (parameter.grad, getattr(parameter, "decoupled_grad", None))
        yield from (gradient for gradient in made if gradient is not None)


def _flat_buffers(rank: ModelRank) -> Iterator[Any]:
    """Megatron's buffers of parameters and gradients."""
    for chunk in rank.optimizer.chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _on_device(tensors: Iterable[Tensor]) -> Storages:
    """The storages of those tensors that are on the platform's device and have bytes, each once."""
    device = current_platform().device.type
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
    return {storage._cdata: storage for storage in found if storage.nbytes() and storage.resizable()}


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """[bytes], uint8: all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_copies() -> None:
    """Wait for the device: copies to and from pinned memory are only begun."""
    if current_platform().name == "cuda":
        torch.cuda.synchronize()


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
