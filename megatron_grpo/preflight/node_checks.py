"""Checks of a machine with GPUs: driver, limits of processes, shared memory."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config

# The first driver for each release of CUDA (CUDA Toolkit Release Notes, "CUDA Driver").
DRIVERS = {12: 525, 13: 580}
OPEN_FILES = 65_535  # NCCL, Ray and vLLM have a socket for many pairs of processes
SHARED_MEMORY = 8 * 2**30  # bytes of /dev/shm: Ray's object store, vLLM's queues, NCCL within a machine


def query_gpus(field: str) -> list[str]:
    """Ask nvidia-smi for a field of each GPU of this machine; empty: unknown."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in process.stdout.splitlines() if line.strip()]


def read_gpu_capability() -> tuple[int, int] | None:
    """Read the lowest compute capability of this machine; None: unknown."""
    try:
        pairs = [value.split(".") for value in query_gpus("compute_cap")]
        return min(((int(major), int(minor)) for major, minor in pairs), default=None)
    except ValueError:
        return None


def read_cuda_release() -> int | None:
    """Read the major release of CUDA that torch was built with; None: unknown."""
    spec = find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    match = None if file is None or not file.exists() else re.search(r"^cuda\b.*= '(\d+)", file.read_text(), re.M)
    return int(match[1]) if match else None


def find_node_remarks(config: Config) -> Iterator[Problem]:
    """Find what NCCL, Ray and vLLM may lack on this machine."""
    if config.cluster.gpus == 0:
        return
    release = read_cuda_release()
    least = DRIVERS.get(release or 0, 0)
    drivers = {int(match[0]) for match in (re.match(r"\d+", value) for value in query_gpus("driver_version")) if match}
    if drivers and min(drivers) < least:
        text = f"the installed torch has CUDA {release}, which needs driver {least} or newer on the machine itself, or"
        text += " NVIDIA's forward compatibility in the container"
        yield Problem(f"NVIDIA driver {min(drivers)}", text)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < OPEN_FILES:
        text = f"may be too few for sockets; ulimit -n {OPEN_FILES}, or docker run --ulimit nofile={OPEN_FILES}"
        yield Problem(f"open files {files}", text)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if config.cluster.num_nodes > 1 and locked != resource.RLIM_INFINITY:
        text = "may be too few for NCCL over InfiniBand; ulimit -l unlimited, or docker run --ulimit memlock=-1"
        yield Problem(f"locked memory {locked} bytes", text)
    shared = _measure_shared_memory()
    if shared is not None and shared < SHARED_MEMORY:
        text = "may be too small for NCCL, vLLM's queues and Ray's objects; docker run --ipc=host, or --shm-size=16g"
        yield Problem(f"/dev/shm {shared / 2**30:.1f} GiB", text)


def _measure_shared_memory() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize
