"""What every kind of memory that processes have in common can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor


class SharedMemory(ABC):
    """Memory of this process that others of this machine and this user can see."""

    address_numbers: ClassVar[int]
    """Numbers that an address is made of."""
    tensor: Tensor
    """[bytes], uint8: all of it."""

    @abstractmethod
    def __init__(self, nbytes: int) -> None:
        """Get so much memory."""

    @abstractmethod
    def address(self) -> list[int]:
        """[address_numbers], int64: where one other process finds it; to be asked for once for each of them."""

    @classmethod
    @abstractmethod
    def seen(cls, address: Sequence[int]) -> Tensor | None:
        """[bytes], uint8: the memory of another process; None: this process does not see it.

        Raises:
            RuntimeError: it does not, and there is no other way.
        """

    @staticmethod
    @abstractmethod
    def settle() -> None:
        """Return when whatever this process has begun to do in such memory is done, so that others may go on."""
