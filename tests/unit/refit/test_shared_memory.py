"""Memory that two real processes have in common, and what is taken for none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_grpo.refit.reshard.shared_memory import SharedMemory, peer_memory

READ = """
import sys
from megatron_grpo.refit.reshard.shared_memory import peer_memory
memory = peer_memory(*map(int, sys.argv[1:]))
print(None if memory is None else memory.tolist())
"""


def _seen_elsewhere(address: list[int]) -> str:
    command = [sys.executable, "-c", READ, *map(str, address)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_another_process_sees_what_is_written() -> None:
    shared = SharedMemory(5)
    shared.tensor.copy_(torch.tensor([1, 2, 3, 4, 250], dtype=torch.uint8))
    assert _seen_elsewhere(shared.address) == "[1, 2, 3, 4, 250]"


def test_what_is_written_later_is_seen_too_and_the_memory_ends_with_its_users() -> None:
    shared = SharedMemory(1 << 20)
    address = shared.address
    seen = peer_memory(*address)
    assert seen is not None
    shared.tensor[7] = 9
    assert seen[7] == 9
    del shared
    assert seen[7] == 9, "who sees it keeps it"
    assert peer_memory(*address) is None


@pytest.mark.parametrize("wrong", ["process", "file", "size", "secret"])
def test_an_address_that_is_not_exactly_right_is_none(wrong: str, tmp_path: Path) -> None:
    """As a process of another machine would read it, where files of these numbers may be anything."""
    shared = SharedMemory(64)
    process, file, nbytes, secret = shared.address
    with (tmp_path / "other").open("wb") as other:
        other.truncate(72)
        addresses = {
            "process": (2**22 + 1, file, nbytes, secret),
            "file": (process, other.fileno(), nbytes, secret),
            "size": (process, file, nbytes - 1, secret),
            "secret": (process, file, nbytes, secret ^ 1),
        }
        assert peer_memory(*addresses[wrong]) is None
    assert peer_memory(process, file, nbytes, secret) is not None
