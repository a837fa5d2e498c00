"""Settings of memory allocators in a rank's environment, read when torch is first imported."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version


def choose_cuda_settings() -> str:
    """Choose PYTORCH_ALLOC_CONF of a rank on a GPU for the installed torch.

    Expandable segments, because microbatches of many sizes fragment segments of fixed size; and pinned blocks above
    64 MB at their exact size, not rounded to a power of two. torch 2.11 refuses to use CUDA at all with the second.
    """
    exact = ",pinned_max_cached_size_mb:64" if Version(version("torch")) >= Version("2.13") else ""
    return f"expandable_segments:True{exact}"
