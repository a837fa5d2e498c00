"""Memory of the host for tensors that come and go: each takes the lowest place that is free."""

from __future__ import annotations

import mmap
import weakref
from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ALIGN_BYTES = 4096
"""Tensors begin at multiples of this, a page."""


class ReusedMemory(TorchFunctionMode):
    """Memory of which the system gives only what was in use at once: within it, `torch.empty_strided` takes from it.

    The C library would leave holes where tensors were, into which the next ones of their size do not go.

    Args:
        nbytes: size of what may be in use at most. It is an address range, which costs nothing before it is written to.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._size = nbytes
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used: list[tuple[int, int]] = []
        """Where tensors begin and end, in order."""

    @property
    def used(self) -> list[tuple[int, int]]:
        """The first byte of each tensor that is in use, and the first one behind it, in order."""
        return list(self._used)

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Everything but that one function is as ever."""
        if function is not torch.empty_strided:
            return function(*args, **(kwargs or {}))
        return self._empty_strided(*args, **(kwargs or {}))

    def _empty_strided(self, size: tuple[int, ...], stride: tuple[int, ...], **options: Any) -> Tensor:
        """As torch's function, of the CPU."""
        dtype: torch.dtype = options.get("dtype") or torch.get_default_dtype()
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        nbytes = (last + 1) * dtype.itemsize if all(size) else 0
        begin = self._lowest(nbytes)
        if not nbytes or begin is None:
            return torch.empty_strided(size, stride, **options)
        view = memoryview(self._map)[begin : begin + nbytes]
        place = begin, begin + nbytes
        insort(self._used, place)
        weakref.finalize(view, self._used.remove, place)  # the last tensor in it holds the view
        return torch.frombuffer(view, dtype=dtype).as_strided(size, stride)

    def _lowest(self, nbytes: int) -> int | None:
        """Where so many bytes are free; None: between what is in use there is no such place."""
        begin = 0
        for used, end in self.used:  # a copy: garbage may be collected meanwhile, and with it a tensor
            if begin + nbytes <= used:
                return begin
            begin = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        return begin if begin + nbytes <= self._size else None
