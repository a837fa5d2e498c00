"""Tracks the device memory of a computation, storage by storage, on fake tensors as on real ones."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_grpo.planning.dry.work import LOG, WorkLog

GRANULE = 512
"""CUDA's caching allocator rounds sizes up to a multiple of this many bytes."""


Moments = dict[tuple[str, str, str], dict[str, int]]
"""By (phase, kind, operator): of the moments when the operator made a tensor of that kind in that phase, the one with
the most bytes alive, and these bytes by kind."""

_KIND: ContextVar[str] = ContextVar("kind", default="other")


@contextmanager
def kind(name: str) -> Iterator[None]:
    """Count storages that the body makes as this kind."""
    token = _KIND.set(name)
    try:
        yield
    finally:
        _KIND.reset(token)


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages that operators in its body make.

    A storage counts while a tensor has it. Not counted are tensors on the meta device, which stand for host memory,
    memory that a kernel allocates and frees within one operator, and the allocator's fragmentation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        """Bytes alive, by kind."""
        self.peak = 0
        """Most bytes that were alive at once."""
        self.holders: dict[str, int] = {}
        """`live` at the peak."""
        self.peaks: dict[str, int] = {}
        """Most bytes alive at once, by phase."""
        self.end_bytes: dict[str, int] = {}
        """Bytes alive at the end, by phase."""
        self.moments: Moments = {}
        """The fullest moments, from which peaks of deeper models are extrapolated."""
        self._fullest: dict[tuple[str, str, str], int] = {}
        self._operator = ""
        self._phase = "other"
        self._total = 0
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        """Storages that are alive, by the address of the C++ object: reference, kind, bytes."""
        self._discounted: set[int] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Make the body a phase with its own peak and default kind."""
        before, self._phase = self._phase, name
        self._note_peak(name)
        try:
            with kind(name):
                yield
        finally:
            self._read_sizes()
            self.end_bytes[name] = self._total
            self._phase = before

    def name_kind(self, tensors: Iterable[Tensor], name: str) -> None:
        """Change the kind of existing storages."""
        for tensor in tensors:
            # torch makes a new Python object for a storage each time; `_cdata` is the address of the one in C++.
            key = tensor.untyped_storage()._cdata
            if key in self._storages:
                reference, before, size = self._storages[key]
                self._storages[key] = reference, name, size
                self.live[before] -= size
                self.live[name] += size

    def discount(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting storages, as if they were in host memory."""
        for key in {tensor.untyped_storage()._cdata for tensor in tensors} & self._storages.keys():
            self._discounted.add(key)
            self._resize(key, 0)

    def count_again(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that were discounted."""
        for key, size in {(storage := tensor.untyped_storage())._cdata: storage.nbytes() for tensor in tensors}.items():
            self._discounted.discard(key)
            self._resize(key, size)

    def count_resized(self, tensors: Iterable[Tensor]) -> None:
        """Count storages anew that were resized, which no operator tells."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata in self._storages:
                self._resize(storage._cdata, storage.nbytes())

    def forget_peaks(self) -> None:
        """Restart the peaks at the bytes that are alive now."""
        self.peak, self.holders, self.peaks, self.moments, self._fullest = 0, {}, {}, {}, {}

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, partial(self._forget, key)), _KIND.get(), 0
            self._resize(key, storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the tensors that it returns."""
        result = func(*args, **(kwargs or {}))
        self._operator = func.name()
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.follow(tensor)
        return result

    def _resize(self, key: int, nbytes: int) -> None:
        reference, kind, before = self._storages[key]
        size = 0 if key in self._discounted else -(-nbytes // GRANULE) * GRANULE
        self._storages[key] = reference, kind, size
        self.live[kind] += size - before
        self._total += size - before
        if size > before:  # the moments on the way down depend on the order in which storages are discounted
            self._note_peak(kind)

    def _forget(self, key: int, _reference: Any) -> None:
        _, kind, size = self._storages.pop(key)
        self.live[kind] -= size
        self._total -= size
        self._discounted.discard(key)

    def _note_peak(self, kind: str) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._total)
        # A moment for each key, not one for all: the peak of a deeper model may have another key.
        key = self._phase, kind, self._operator
        if self._total > self._fullest.get(key, -1):
            self._fullest[key] = self._total
            self.moments[key] = {kind: size for kind, size in self.live.items() if size}
        if self._total > self.peak:
            self.peak, self.holders = self._total, self.moments[key]

    def _read_sizes(self) -> None:
        # Resizing a storage (`untyped_storage().resize_`) does not pass through __torch_dispatch__.
        for key, (reference, _, _) in list(self._storages.items()):
            storage = reference()
            if storage is not None:
                self._resize(key, storage.nbytes())


_WRITERS = ("copy_", "zero_", "fill_.Scalar", "mul_.Tensor", "mul_.Scalar", "add_.Tensor", "add_.Scalar", "div_.Tensor")
IN_PLACE = {f"aten::{name}" for name in _WRITERS}
"""Operators that only write numbers into their first argument. On floating-point tensors they are skipped for speed."""


class DryMode(MemoryTracker):
    """A tracker that stands in for numbers and peers.

    `top_k`: experts of a token; 0 without experts. The work of operators is in `log`.
    """

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self._top_k = top_k
        self.log = WorkLog()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Make the body a phase of memory and of work."""
        before, self.log.phase, token = self.log.phase, name, LOG.set(self.log)
        try:
            with super().phase(name):
                yield
        finally:
            self.log.phase = before
            LOG.reset(token)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer in the operator's place, or run it and count its tensors."""
        name = func.name()
        if name in IN_PLACE and args[0].is_floating_point():
            self.log.note_writer(name, args)
            return args[0]
        if name == "aten::_local_scalar_dense":
            # The host reads a number, such as a loss or the norm of gradients: 1 is finite, and no reason to stop.
            number = args[0]
            return True if number.dtype == torch.bool else 1.0 if number.is_floating_point() else 1
        if name == "aten::equal":  # the ends of packed queries and keys, which a delta net compares
            return True
        if name == "aten::masked_select":
            # How many rows are selected depends on numbers. The router's mask, the only one, selects top_k a token.
            counts = args[0].new_zeros(args[1].shape[-1] * self._top_k)
            self.follow(counts)
            self.log.note_operator(func, args, counts)
            return counts
        if name.startswith("c10d::"):
            # A collective writes into tensors that its caller made, so nothing is allocated here.
            self.log.note_message(name, args)
            results = [
                _build_finished_work() if "Work" in str(returned.type) else args[0] for returned in func._schema.returns
            ]
            return results[0] if len(results) == 1 else tuple(results)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.log.note_operator(func, args, result)
        return result


def _build_finished_work() -> Any:
    return torch._C._distributed_c10d.FakeWork().boxed()
