"""Checks of a machine's GPUs, limits, kernels and folders, which every node of a run has to pass.

`examine_node` needs no other machine, no torch and no Ray, so that whatever starts processes on nodes can call it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight.rules import Rule, evaluate_rules

# The first driver for each release of CUDA (CUDA Toolkit Release Notes, "CUDA Driver").
DRIVERS = {12: 525, 13: 580}
OPEN_FILES = 65_535  # NCCL, Ray and vLLM have a socket for many pairs of processes
SHARED_MEMORY = 8 * 2**30  # bytes of /dev/shm: Ray's object store, vLLM's queues, NCCL within a machine
USED_MEMORY_MIB = 2048  # of a GPU: more before a run starts belongs to another process


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
    spec = importlib.util.find_spec("torch")
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
    shared = measure_shared_memory()
    if shared is not None and shared < SHARED_MEMORY:
        text = "may be too small for NCCL, vLLM's queues and Ray's objects; docker run --ipc=host, or --shm-size=16g"
        yield Problem(f"/dev/shm {shared / 2**30:.1f} GiB", text)


def measure_shared_memory() -> int | None:
    """Measure /dev/shm in bytes; None: there is none."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


@evaluate_rules
def find_fp8_machine_problems(config: Config) -> Iterator[Rule]:
    """Check that the GPUs of this machine support the recipe of FP8."""
    fp8 = config.policy.fp8
    if not fp8.is_on_device or config.cluster.gpus == 0:
        return
    capability = read_gpu_capability()
    if capability is not None and capability < fp8.least_capability:
        least, lowest = (".".join(map(str, pair)) for pair in (fp8.least_capability, capability))
        advice = "off" if capability < (8, 9) else "recipe=tensorwise"
        text = f"recipe={fp8.recipe} needs GPUs of compute capability {least}, and this machine has {lowest};"
        text += f" use {advice}"
        yield True, "policy.fp8.format=", text


@evaluate_rules
def find_delta_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check that this machine has the kernels of the policy's delta nets."""
    has_delta = shape is not None and shape.delta is not None and config.debug.train and config.cluster.gpus > 0
    text = "has delta nets, and flash-linear-attention, which has their kernels, is not installed here: pip install"
    text += (
        " fla-core. In plain torch, which policy.deterministic=true takes, each layer has 36 operators for 32 tokens of"
    )
    text += " a sequence, and a step takes several times as long"
    is_missing = not config.policy.deterministic and importlib.util.find_spec("fla") is None
    yield has_delta and is_missing, "policy.model.path=", text


def examine_node(
    config: Config, shape: ModelShape | None, folders: Sequence[str]
) -> tuple[list[Problem], list[Problem]]:
    """Check this node for a run; returns problems and remarks.

    Args:
        config: configuration of the run.
        shape: the policy's sizes; None: not known.
        folders: those that every node reads.
    """
    subject = f"cluster.gpus_per_node={config.cluster.gpus}"
    problems = [
        Problem(folder, "is not there; it has to be on a filesystem of all nodes")
        for folder in folders
        if not os.path.isdir(folder)
    ]
    answering = len(query_gpus("uuid"))
    if 0 < answering < config.cluster.gpus:
        problems.append(Problem(subject, f"only {answering} GPUs answer nvidia-smi"))
    problems += [*find_fp8_machine_problems(config), *find_delta_problems(config, shape)]
    return problems, [*find_node_remarks(config), *_find_gpu_remarks(config)]


def _find_gpu_remarks(config: Config) -> Iterator[Problem]:
    """Find GPUs that other processes use, or that have had memory errors."""
    if config.cluster.gpus == 0:
        return
    for number, used in enumerate(_query_numbers("memory.used")):
        if used > USED_MEMORY_MIB:
            text = "is in use before the run starts; end the process that has it, or leave the node out"
            yield Problem(f"memory of GPU {number}", f"{used / 1024:.1f} GiB of it {text}")
    for number, errors in enumerate(_query_numbers("ecc.errors.uncorrected.volatile.total")):
        if errors:
            text = "uncorrected memory errors since its last reset; reset it, or leave the node out"
            yield Problem(f"memory of GPU {number}", f"has had {errors} {text}")


def _query_numbers(field: str) -> list[int]:
    """Ask nvidia-smi for a number of each GPU; 0: it has none."""
    matches = (re.match(r"\d+", value) for value in query_gpus(field))
    return [int(match[0]) if match else 0 for match in matches]
