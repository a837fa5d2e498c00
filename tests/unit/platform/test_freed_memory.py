"""Holes between what stays go back to the system when the heap grows, and not before."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

MIB = 1 << 20

PROGRAM = """
import json, resource
import torch
from pathlib import Path
from megatron_grpo.cpu.host_memory import FreedMemory

def resident():
    numbers = Path("/proc/self/statm").read_text().split()
    return (int(numbers[1]) - int(numbers[2])) * resource.getpagesize()

freed = FreedMemory()
kept, goes = [], []
for _ in range(64):
    goes.append(torch.ones(1 << 20, dtype=torch.uint8))
    kept.append(torch.ones(1 << 12, dtype=torch.uint8))
freed.bound()
full = resident()
goes.clear()
freed.bound()
holes = resident()
large = torch.ones(2 << 20, dtype=torch.uint8)
freed.bound()
print(json.dumps({"freed": full - holes, "given_back": holes + (2 << 20) - resident()}))
"""
"""Frees every other piece of 1 MiB, and then takes one of 2 MiB, for which no hole is large enough."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_holes_go_back_when_the_heap_grows() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(ran.stdout)
    assert abs(found["freed"]) < 4 * MIB, "they stay for what comes next"
    assert found["given_back"] > 56 * MIB
