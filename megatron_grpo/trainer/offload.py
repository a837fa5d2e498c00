"""Moves a rank's weights, gradients and optimizer state off its device while engines use it, and back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_grpo.platform.device import Platform
    from megatron_grpo.trainer.rank import ModelRank


logger = logging.getLogger(__name__)


class DeviceMemory:
    """The device memory of a rank's model: weights, gradients and optimizer state.

    Memory is released storage by storage, by resizing each storage to 0 bytes and later back. The distributed optimizer
    makes this necessary: Megatron-Core keeps parameters and gradients in flat buffers, of which every parameter and
    every main_grad, every bucket and every shard of the optimizer is a view. Moving parameters with `.to("cpu")` would
    give each of them memory of its own and break the views, so that all-gathers would write into buffers that no
    parameter reads. An emptied storage stays the same object, so when its bytes return all views are valid again, and
    neither Megatron-Core nor the optimizer notices. Three kinds of memory are restored at different costs:

    - the optimizer's float32 weights and moments are copied to pinned host memory and back;
    - gradients are dropped, and come back as zeros;
    - weights are copied only if asked (`weights=True`), since a refit reads them while engines already run.

    A storage can be of two kinds: without bfloat16 the optimizer's float32 weights are the weights themselves.
    """

    def __init__(self, rank: ModelRank) -> None:
        self._rank, self._platform = rank, rank.platform
        self._emptied: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """Storages that are empty now, each with its full size in bytes."""
        self._hosts: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """Host copies of storages, [bytes], uint8; kept for the next time, since pinning takes longer than copying."""
        self._without_weights = False

    def require_weights(self) -> None:
        """Raise a RuntimeError if the weights are in host memory."""
        if self._without_weights:
            raise RuntimeError("the weights are in host memory while engines use the device")

    @torch.no_grad()
    def offload(self, weights: bool) -> None:
        """Move the optimizer's state to host memory and drop gradients; collective over data-parallel ranks.

        Storages that are already empty stay empty.

        Args:
            weights: move the weights too, including those of a reference policy on the device.
        """
        if self._without_weights:
            return
        self._rank.gather_chunks()  # completes all-gathers of updated weights that are still pending
        of_weights = self._storages(iter_weights(self._rank))
        state, gradients = self._storages(iter_optimizer_state(self._rank)), self._storages(iter_gradients(self._rank))
        # In float32 the weights that the optimizer updates are the model's own.
        moved = {key: one for key, one in state.items() if key not in of_weights} | (of_weights if weights else {})
        dropped = {key: one for key, one in gradients.items() if key not in state and key not in of_weights}
        for key, storage in moved.items():
            self._host(key, storage).copy_(_bytes(storage), non_blocking=True)
        self._finish_copies()
        for key, storage in (moved | dropped).items():
            self._emptied[key] = storage, storage.nbytes()
            storage.resize_(0)
        self._without_weights = weights
        _drop_copies(self._rank)
        if self._platform.name == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        logger.info("%.1f MiB released so far", sum(nbytes for _, nbytes in self._emptied.values()) / 2**20)

    @torch.no_grad()
    def onload(self) -> None:
        """Restore everything; gradients are zero."""
        for key, (storage, nbytes) in self._emptied.items():
            storage.resize_(nbytes)
            if key in self._hosts:
                _bytes(storage).copy_(self._hosts[key][1], non_blocking=True)
            else:
                _bytes(storage).zero_()
        self._finish_copies()
        self._hosts = {key: host for key, host in self._hosts.items() if key in self._emptied}
        self._emptied, self._without_weights = {}, False

    def _host(self, key: int, storage: torch.UntypedStorage) -> Tensor:
        """[bytes of the storage], uint8: host memory for its content."""
        known = self._hosts.get(key)
        if known is None or known[1].numel() != storage.nbytes():
            pinned, place = self._platform.name == "cuda", self._platform.host
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, device=place, pin_memory=pinned)
            self._hosts[key] = known = storage, host
        return known[1]

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """The non-empty storages of the tensors that are on the platform's device, by the address of torch's object."""
        device = self._platform.device.type
        found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
        return {storage._cdata: storage for storage in found if storage.nbytes() and storage.resizable()}

    def _finish_copies(self) -> None:
        """Wait for the device, because copies to and from pinned memory are asynchronous."""
        if self._platform.name == "cuda":
            torch.cuda.synchronize()


def _drop_copies(rank: ModelRank) -> None:
    """Drop the caches that Transformer Engine keeps beside parameters and fills again in the next pass.

    They hold FP8 copies of bfloat16 weights and transposes of FP8 weights (one or two bytes a parameter), a placeholder
    for the gradients of each shape that are accumulated outside autograd, and cuBLAS's workspaces.
    """
    for chunk in (*rank.chunks, *(rank.reference or ())):
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()
        for parameter in chunk.parameters():
            if hasattr(parameter, "update_usage"):  # an FP8 parameter
                parameter.update_usage(rowwise_usage=True, columnwise_usage=False)
    if "transformer_engine.pytorch" in sys.modules:
        from transformer_engine.pytorch.cpp_extensions.gemm import get_cublas_workspace
        from transformer_engine.pytorch.module.base import _dummy_wgrads

        _dummy_wgrads.clear()
        get_cublas_workspace.cache_clear()


def iter_weights(rank: ModelRank) -> Iterator[Tensor]:
    """Parameters, buffers and flat parameter buffers of the model and its reference."""
    for chunk in (*rank.chunks, *(rank.reference or ())):
        yield from map(_numbers, chunk.parameters())
        yield from chunk.buffers()
    for buffer in _flat_buffers(rank):
        if buffer.param_data is not None:
            yield buffer.param_data


def _numbers(parameter: Tensor) -> Tensor:
    """The tensor with a parameter's memory: an FP8 parameter of Transformer Engine's is a shell around it."""
    held = getattr(parameter, "get_data_tensors", None)
    return parameter if held is None else held(columnwise_data=False)


def iter_optimizer_state(rank: ModelRank) -> Iterator[Tensor]:
    """Float32 weights, moments and other state of the optimizers."""
    for megatron in rank.optimizer.optimizer.chained_optimizers:
        optimizer = getattr(megatron, "optimizer", None)  # stages without experts have an empty expert optimizer
        if optimizer is None:
            continue
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def iter_gradients(rank: ModelRank) -> Iterator[Tensor]:
    """The buffers that gradients are summed in, and the gradients that the optimizer made of them."""
    yield from (buffer.grad_data for buffer in _flat_buffers(rank))
    for parameter in iter_optimizer_state(rank):
        made = (parameter.grad, getattr(parameter, "decoupled_grad", None))
        yield from (gradient for gradient in made if gradient is not None)


def _flat_buffers(rank: ModelRank) -> Iterator[Any]:
    """Megatron's buffers of parameters and gradients."""
    for chunk in rank.optimizer.chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """[bytes], uint8: all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def move_to_host(chunks: Sequence[torch.nn.Module], platform: Platform) -> None:
    """Move a frozen model's parameters to host memory, pinned if there is a GPU."""
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        host = parameter.data.cpu()
        parameter.data = host.pin_memory() if platform.name == "cuda" else host


@contextmanager
def on_device(chunks: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Copy a model's parameters from host memory to a device for the body.

    Afterwards the parameters are the host copies again, and may be changed there; nothing is copied back.
    """
    hosted = [(parameter, parameter.data) for chunk in chunks for parameter in chunk.parameters()]
    try:
        for parameter, host in hosted:
            parameter.data = host.to(device, non_blocking=True)
        yield
    finally:
        for parameter, host in hosted:
            parameter.data = host
