"""Settings of memory allocators in a rank's environment: glibc's on a CPU, torch's on a GPU."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

# Settings of glibc for ranks on CPUs, read as a process starts: keep the memory of large tensors for later ones. Mapped
# anew each time, by glibc's defaults, their page faults take a sixth of a train phase.
CPU_SETTINGS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30)}


def choose_cuda_settings() -> str:
    """Choose PYTORCH_ALLOC_CONF for the installed torch, which reads it when imported.

    Expandable segments, because microbatches of many sizes fragment segments of fixed size; and pinned blocks above
    64 MB at their exact size, not rounded to a power of two. torch 2.11 refuses to use CUDA at all with the second.
    """
    return ",".join(filter(None, ["expandable_segments:True", choose_pinned_settings()]))


def choose_pinned_settings() -> str:
    """Choose the part of PYTORCH_ALLOC_CONF for pinned memory; may be empty."""
    return "pinned_max_cached_size_mb:64" if Version(version("torch")) >= Version("2.13") else ""
