"""Memory of the host that processes of one machine have in common."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_grpo.refit.ipc.interface import SharedMemory

_SECRET_BYTES = 8


class HostMemory(SharedMemory):
    """Memory without a name, which is gone with the last process that has it; Linux only.

    Args:
        nbytes: size.
    """

    address_numbers = 4

    @staticmethod
    def exists() -> bool:
        """Whether the operating system has it."""
        return hasattr(os, "memfd_create")

    def __init__(self, nbytes: int) -> None:
        self._file = os.fdopen(os.memfd_create("refit"), "r+b", buffering=0)
        self._file.truncate(nbytes + _SECRET_BYTES)
        whole = _mapped(self._file.fileno(), nbytes + _SECRET_BYTES)
        self.tensor = whole[:nbytes]
        self._secret = secrets.randbits(63)
        whole[nbytes:] = _bytes_of(self._secret)

    def address(self) -> list[int]:
        """Process, file, size, and a secret that stands behind the last byte."""
        return [os.getpid(), self._file.fileno(), self.tensor.numel(), self._secret]

    @classmethod
    def seen(cls, address: Sequence[int]) -> Tensor | None:
        """[bytes], uint8: the memory; None: it is of another machine or user, though the numbers may be known here."""
        process, file, nbytes, secret = address
        path = Path(f"/proc/{process}/fd/{file}")
        size = nbytes + _SECRET_BYTES
        try:
            # On another machine any file may have this number. It is only opened when it is an ordinary one of the
            # size.
            found = path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            with path.open("r+b", buffering=0) as opened:
                whole = _mapped(opened.fileno(), size)
        except OSError:
            return None
        return whole[:nbytes] if torch.equal(whole[nbytes:], _bytes_of(secret)) else None

    @staticmethod
    def settle() -> None:
        """Nothing to wait for: what the processor has written is there."""


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _bytes_of(secret: int) -> Tensor:
    return torch.tensor([secret], dtype=torch.int64).view(torch.uint8)
