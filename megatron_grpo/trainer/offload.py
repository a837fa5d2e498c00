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
    """Device memory of a rank's model: weights, gradients and optimizer state.

    Memory is released storage by storage, by resizing each storage to 0 bytes and later back. The distributed optimizer
    makes this necessary: Megatron-Core keeps parameters and gradients in flat buffers, of which every parameter and
    every main_grad, every bucket and every shard of the optimizer is a view. Moving parameters with `.to("cpu")` would
    give each of them memory of its own and break the views, so that all-gathers would write into buffers that no
    parameter reads. An emptied storage stays the same object, so when its bytes return all views are valid again, and
    neither Megatron-Core nor the optimizer notices. Three kinds of memory are restored at different costs:

    - the optimizer's float32 weights and moments are copied to pinned host memory and back;
    - gradients are dropped, and come back as zeros;
    - weights are copied only if asked (`weights=True`), since a refit reads them while engines already run.
    """

    def __init__(self, rank: ModelRank) -> None:
        self._rank, self._platform = rank, rank.platform
        # Storages that are empty now, each with its full size in bytes.
        self._emptied: dict[int, tuple[torch.UntypedStorage, int]] = {}
        # Host copies of storages, [bytes], uint8, which are reused because pinning takes longer than copying.
        self._hosts: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._weights_offloaded = False

    def require_weights(self) -> None:
        if self._weights_offloaded:
            raise RuntimeError("the weights are in host memory while engines use the device")

    @torch.no_grad()
    def offload(self, weights: bool) -> None:
        """Move the optimizer's state and optionally `weights` to host memory, drop gradients; collective."""
        if self._weights_offloaded:
            return
        self._rank.gather_chunks()  # completes all-gathers of updated weights that are still pending
        parameters = self._find_storages(iter_weights(self._rank))
        state = self._find_storages(iter_optimizer_state(self._rank))
        gradients = self._find_storages(iter_gradients(self._rank))
        # In float32 the weights that the optimizer updates are those of the model, which may have to stay.
        moved = {key: storage for key, storage in state.items() if key not in parameters}
        moved |= parameters if weights else {}
        dropped = {key: storage for key, storage in gradients.items() if key not in state and key not in parameters}
        is_cuda, device = self._platform.name == "cuda", self._platform.host
        for key, storage in moved.items():
            if key not in self._hosts or self._hosts[key][1].numel() != storage.nbytes():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device, pin_memory=is_cuda)
                self._hosts[key] = storage, host
            self._hosts[key][1].copy_(_view_bytes(storage), non_blocking=True)
        self._finish_copies()
        for key, storage in (moved | dropped).items():
            self._emptied[key] = storage, storage.nbytes()
            storage.resize_(0)
        self._weights_offloaded = weights
        _drop_copies(self._rank)
        if is_cuda:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        logger.info("%.1f MiB released so far", sum(nbytes for _, nbytes in self._emptied.values()) / 2**20)

    @torch.no_grad()
    def onload(self) -> None:
        """Restore everything; gradients are zero."""
        for key, (storage, nbytes) in self._emptied.items():
            storage.resize_(nbytes)
            if key in self._hosts:
                _view_bytes(storage).copy_(self._hosts[key][1], non_blocking=True)
            else:
                _view_bytes(storage).zero_()
        self._finish_copies()
        self._hosts = {key: host for key, host in self._hosts.items() if key in self._emptied}
        self._emptied, self._weights_offloaded = {}, False

    def _find_storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        device = self._platform.device.type
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device)
        return {storage._cdata: storage for storage in storages if storage.nbytes() and storage.resizable()}

    def _finish_copies(self) -> None:
        # Copies to and from pinned memory are asynchronous.
        if self._platform.name == "cuda":
            torch.cuda.synchronize()


def _drop_copies(rank: ModelRank) -> None:
    # Transformer Engine's caches, which the next pass fills again: FP8 copies of bfloat16 weights and transposes of FP8
    # weights (one or two bytes a parameter), a placeholder for the gradients of each shape that are accumulated outside
    # autograd, and cuBLAS's workspaces.
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
    """Iterate over parameters and buffers of model and reference."""
    for chunk in (*rank.chunks, *(rank.reference or ())):
        for parameter in chunk.parameters():
            # An FP8 parameter of Transformer Engine is a shell around the tensor that has its memory.
            get_data_tensors = getattr(parameter, "get_data_tensors", None)
            yield parameter if get_data_tensors is None else get_data_tensors(columnwise_data=False)
        yield from chunk.buffers()
    if rank.teacher_heads is not None:
        yield from rank.teacher_heads.weights
    for buffer in _iter_flat_buffers(rank):
        if buffer.param_data is not None:
            yield buffer.param_data


def iter_optimizer_state(rank: ModelRank) -> Iterator[Tensor]:
    """Iterate over float32 weights, moments and other state of the optimizers."""
    for megatron in rank.optimizer.optimizer.chained_optimizers:  # Muon's layer-wise optimizer has one within
        optimizer = getattr(megatron, "optimizer", None)  # stages without experts have an empty expert optimizer
        if optimizer is None:
            continue
        for param_group in optimizer.param_groups:
            yield from param_group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def iter_gradients(rank: ModelRank) -> Iterator[Tensor]:
    """Iterate over gradient buffers and the optimizer's gradients."""
    yield from (buffer.grad_data for buffer in _iter_flat_buffers(rank))
    for parameter in iter_optimizer_state(rank):
        gradients = (parameter.grad, getattr(parameter, "decoupled_grad", None))
        yield from (gradient for gradient in gradients if gradient is not None)


def _iter_flat_buffers(rank: ModelRank) -> Iterator[Any]:
    for chunk in rank.optimizer.chunks:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def move_to_host(chunks: Sequence[torch.nn.Module], platform: Platform) -> None:
    """Move a frozen model's parameters to (pinned) host memory."""
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        host = parameter.data.cpu()
        parameter.data = host.pin_memory() if platform.name == "cuda" else host


@contextmanager
def on_device(chunks: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Put a model's parameters from host memory on a device in the body."""
    # Afterwards the parameters are the host copies again: changes that the body made are dropped.
    hosted = [(parameter, parameter.data) for chunk in chunks for parameter in chunk.parameters()]
    try:
        for parameter, host in hosted:
            parameter.data = host.to(device, non_blocking=True)
        yield
    finally:
        for parameter, host in hosted:
            parameter.data = host
