"""Which cores the processes of a CPU engine run on, and how they are prepared before vLLM is imported."""

from __future__ import annotations

import os

from megatron_grpo.generation.vllm_arguments import VllmSettings
from megatron_grpo.generation.vllm_fork import start_importing


def prepare_cpu_processes(settings: VllmSettings) -> None:
    """Bind the workers to cores, and begin to import vLLM for them; before this process imports it."""
    ranks = settings.config.parallel.ranks_per_engine
    cores = cores_of_ranks(
        sorted(os.sched_getaffinity(0)),
        first=settings.index * ranks,
        ranks=ranks,
        total=settings.config.parallel.data * ranks,
    )
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    if settings.config.engine.enforce_eager:
        # vLLM compiles how it counts a token's rank among the others all the same: seconds, for a number nobody reads.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    start_importing(threads=len(cores.split("|")[0].split(",")))


def cores_of_ranks(cores: list[int], *, first: int, ranks: int, total: int) -> str:
    """vLLM's thread binding for ranks [first, first + ranks) when `total` ranks share the cores evenly.

    Returns:
        One comma-separated core list per rank, joined by "|"; a rank without a core of its own shares one.
    """
    if total > len(cores):
        return "|".join(str(cores[rank % len(cores)]) for rank in range(first, first + ranks))
    share = len(cores) // total
    return "|".join(
        ",".join(str(core) for core in cores[rank * share : (rank + 1) * share]) for rank in range(first, first + ranks)
    )
