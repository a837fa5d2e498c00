"""What the C library does with memory that is freed. Only with glibc; with another one nothing changes."""

from __future__ import annotations

import ctypes
import platform

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
