"""What the C library does with memory that is freed. Only with glibc; with another one nothing changes."""

from __future__ import annotations

import ctypes
import mmap
import platform
import weakref
from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Let up to 1 GiB that is freed stay with the process: coming back from the system, it costs 2 us for each 4 KiB.

    That is more than writing to it does. With another C library than glibc nothing changes.
    """
    library = _glibc()
    if library is not None:
        for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            library.mallopt(parameter, _KEPT_BYTES)


class FreedMemory:
    """Keeps what a process frees for what it takes next, and holes from becoming many.

    What is freed between things that stay leaves a hole into which another one of its size does not go: to align it,
    the C library wants more. So the heap of a process that takes as much as it frees may grow. Each time that it has,
    all holes go back to the system, and get memory again when something that is small enough is put into them.
    """

    def __init__(self) -> None:
        keep_freed_memory()
        self._heap_end = 0
        self.bound()

    def bound(self) -> None:
        """Give holes back if the heap is larger than ever before; to be called after something large was taken."""
        library = _glibc()
        if library is None:
            return
        library.sbrk.argtypes, library.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
        end = library.sbrk(0)
        if end > self._heap_end:
            library.malloc_trim(ctypes.c_size_t(_KEPT_BYTES))  # what is free at the end of the heap stays
            self._heap_end = end


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


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
