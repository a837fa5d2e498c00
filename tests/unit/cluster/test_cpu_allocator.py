"""A rank on a CPU gets memory again that it has freed, without faults for its pages."""

from __future__ import annotations

import os
import subprocess
import sys

from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.schema import ClusterConfig

BUFFERS = """
import ctypes, resource
libc, size = ctypes.CDLL(None), ctypes.c_size_t(64 << 20)
libc.malloc.restype = ctypes.c_void_p
def count_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    before = count_faults()
    buffer = ctypes.c_void_p(libc.malloc(size))
    libc.memset(buffer, 1, size)
    libc.free(buffer)
    print(count_faults() - before)
"""


def count_page_faults(environment: dict[str, str]) -> list[int]:
    """Page faults of a first buffer of 64 MiB and of a second one, after the first is freed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-I", "-c", BUFFERS]
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_freed_memory_of_ranks_on_cpus_stays_mapped() -> None:
    cluster = RayCluster(ClusterConfig(gpus_per_node=0))
    environment = cluster.build_policy_options(0)["runtime_env"]["env_vars"]
    assert cluster.build_value_options(0)["runtime_env"]["env_vars"] == environment
    first, second = count_page_faults(environment)
    assert second < first / 4


def test_by_glibcs_defaults_it_does_not() -> None:
    """Guards the test above."""
    first, second = count_page_faults({})
    assert second > first / 2
