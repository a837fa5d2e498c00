"""Memory that processes of one machine have in common: messages in it are handed over instead of sent."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from pathlib import Path

import torch
from torch import Tensor

_SECRET_BYTES = 8
ADDRESS_NUMBERS = 4
"""Numbers that an address is made of."""


class SharedMemory:
    """Memory without a name, which is gone with the last process that has it; Linux only.

    Args:
        nbytes: size.
    """

    @staticmethod
    def exists() -> bool:
        """Whether the operating system has it."""
        return hasattr(os, "memfd_create")

    def __init__(self, nbytes: int) -> None:
        self._file = os.fdopen(os.memfd_create("refit"), "r+b", buffering=0)
        self._file.truncate(nbytes + _SECRET_BYTES)
        whole = _mapped(self._file.fileno(), nbytes + _SECRET_BYTES)
        self.tensor = whole[:nbytes]
        """[nbytes], uint8, zeros at first."""
        self._secret = secrets.randbits(63)
        whole[nbytes:] = _bytes_of(self._secret)

    @property
    def address(self) -> list[int]:
        """What `peer_memory` finds it by: process, file, size, and a secret that stands behind the last byte."""
        return [os.getpid(), self._file.fileno(), self.tensor.numel(), self._secret]


def peer_memory(process: int, file: int, nbytes: int, secret: int) -> Tensor | None:
    """[nbytes], uint8: the memory that a process of this machine and this user shares; None: it is none of these.

    Args:
        process: number of the process, which may be one of another machine, as in `SharedMemory.address`.
        file: number of its file.
        nbytes: size of the memory.
        secret: what stands behind it.
    """
    path = Path(f"/proc/{process}/fd/{file}")
    size = nbytes + _SECRET_BYTES
    try:
        # On another machine any file may have this number. It is only opened when it is an ordinary one of the size.
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return None
        with path.open("r+b", buffering=0) as opened:
            whole = _mapped(opened.fileno(), size)
    except OSError:
        return None
    return whole[:nbytes] if torch.equal(whole[nbytes:], _bytes_of(secret)) else None


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _bytes_of(secret: int) -> Tensor:
    return torch.tensor([secret], dtype=torch.int64).view(torch.uint8)
