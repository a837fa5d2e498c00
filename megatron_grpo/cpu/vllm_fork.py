"""The processes of a CPU engine are forked from one that has imported vLLM, which costs each ten seconds of a core.

vLLM itself would spawn them: it must not fork a Ray actor, whose threads a fork does not take along, and on a CPU it
tells OpenMP by environment variables, read when a process begins, how many threads there are and where. So a process
without threads of its own imports vLLM while the actor does the same; the engine core is forked from that, and the
workers from the engine core (as vLLM does on GPUs). A model of one rank has no worker: the core computes it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

PRELOADED = "megatron_grpo.cpu.vllm_preload"

SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's environment variable for the folder in which its processes have their sockets."""


class ForkedCore(ForkServerProcess):
    """vLLM's engine core. It takes along the environment of the actor, as a process that is spawned would."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "environment": dict(os.environ)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ.update(state.pop("environment"))
        self.__dict__.update(state)


class ForkedCoreContext(ForkServerContext):
    """Starts engine cores; everything else is multiprocessing's."""

    Process = ForkedCore


def start_importing(threads: int) -> None:
    """Start the process that imports vLLM for the others; call it before this process imports vLLM itself.

    Args:
        threads: OpenMP threads of each worker.
    """
    os.environ.setdefault(SOCKETS, util.get_temp_dir())
    multiprocessing.set_forkserver_preload([PRELOADED])
    with _environment(OMP_NUM_THREADS=str(threads), **_torch_openmp()):
        forkserver.ensure_running()


def fork_from_there() -> None:
    """Let vLLM start its engine core (when this is the actor) or its workers (when this is the core) by a fork."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    utils.get_mp_context = ForkedCoreContext
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = _meeting_file


def in_core() -> bool:
    """Whether this process is a forked engine core."""
    return isinstance(multiprocessing.current_process(), ForkedCore)


def forget_sockets() -> None:
    """Remove the folder of the sockets over which forks are asked for and vLLM's processes talk, and of their meeting.

    After the start nothing is forked, and all are connected: an engine that is killed leaves nothing of this behind.
    """
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)


def parent_is_gone() -> bool:
    """Whether the process that asked for this one has ended; a process that it forked from may live on."""
    parent = multiprocessing.parent_process()
    if in_core():
        return parent is None or not parent.is_alive()
    return parent is not None and parent.pid != os.getppid()


def _meeting_file() -> str:
    """Where the workers meet: vLLM's own choice is a file in the system's folder, which stays there."""
    return f"file://{os.environ[SOCKETS]}/{uuid.uuid4().hex}"


def _torch_openmp() -> dict[str, str]:
    """LD_PRELOAD with the OpenMP library that comes with torch, which vLLM wants all its processes to begin with."""
    loaded = os.environ.get("LD_PRELOAD", "")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or "omp" in loaded:
        return {}
    torch = Path(spec.origin).parent
    found = [path for folder in (torch.parent / "torch.libs", torch / "lib") for path in folder.glob("libgomp*.so*")]
    return {"LD_PRELOAD": ":".join(filter(None, [loaded, *map(str, found[:1])]))}


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
