"""Checks a node before a run: python -m megatron_grpo.launch.node_check RUN_DIR MARK GPUS.

Each node of a Slurm job calls it (launchers/slurm_pyxis.sbatch). The last line of the output is the number of network
links that are up, "8 links", or with exit code 1 the reason why the node cannot take part.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_grpo.preflight.node_checks import OPEN_FILES, SHARED_MEMORY, measure_shared_memory, query_gpus

MARK_FILE = ".shared"  # in the run's folder; its text is MARK
INFINIBAND = Path("/sys/class/infiniband")
SHARING_S = 30.0  # a file server shows a new file to other nodes within these seconds


def main(arguments: Sequence[str]) -> int:
    """Print the result of the check; return the exit code."""
    folder, mark, gpus = arguments
    links = count_links()
    problems = list(find_node_problems(int(gpus), links))
    problems += [] if has_mark(Path(folder), mark) else [f"does not share the folder {folder} with the first node"]
    print("; ".join(problems) or f"{links} links")
    return 1 if problems else 0


def count_links(devices: Path = INFINIBAND) -> int:
    """Count ports of InfiniBand and RoCE that are up."""
    return sum("ACTIVE" in state.read_text() for state in devices.glob("*/ports/*/state"))


def find_node_problems(gpus: int, links: int, devices: Path = INFINIBAND) -> Iterator[str]:
    """Find why a node with this number of GPUs cannot take part."""
    answering = len(query_gpus("uuid")) if gpus else 0
    if answering < gpus:
        yield f"{answering} of {gpus} GPUs answer"
    if not links and any(devices.glob("*/ports/*")):
        yield "no port of its network adapters is up"
    if not gpus:
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < OPEN_FILES:
        yield f"open files are limited to {files}, and {OPEN_FILES} are needed"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if links and locked != resource.RLIM_INFINITY:
        yield f"locked memory is limited to {locked} bytes, and the network needs it unlimited"
    memory = measure_shared_memory() or 0
    if memory < SHARED_MEMORY:
        yield f"/dev/shm has {memory / 2**30:.1f} GiB, and {SHARED_MEMORY / 2**30:.0f} are needed"


def has_mark(folder: Path, mark: str, deadline_s: float = SHARING_S) -> bool:
    """Wait for the first node's text in the folder; False: it is late."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            if (folder / MARK_FILE).read_text() == mark:
                return True
        except OSError:
            pass  # not there yet
        if time.monotonic() > end:
            return False
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
