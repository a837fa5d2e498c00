"""Ends every process of an engine: from its actor, or from outside if the actor is gone, stopped or stuck."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import ray

from megatron_grpo.cluster.cleanup import find_shared_files, is_alive, kill_stopped, remove_segments

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

END_S = 20.0
"""Seconds that killed processes have to disappear; a process inside a device driver's call ends when it returns."""
LOOK_S = 0.05
GRACE_S = 5.0
"""Seconds for vLLM's processes to end by themselves; killed processes leave their shared memory behind."""


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """The processes of one engine on the machine of its actor."""

    node: str
    """Ray's name of the machine."""
    started: tuple[tuple[int, float], ...]
    """Pid and start time (seconds since the epoch) of each process; the time is needed because pids are reused."""


def own_processes() -> EngineProcesses:
    """The processes of the calling actor, including the actor itself."""
    own, started = psutil.Process(), []
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            started.append((process.pid, process.create_time()))
    return EngineProcesses(ray.get_runtime_context().get_node_id(), tuple(started))


def end_own(llm: AsyncLLM) -> None:
    """End the processes that the calling actor has started for its engine, and free their shared memory."""
    own = psutil.Process()
    children = own.children(recursive=True)
    segments = set().union(*(find_shared_files(process) for process in [own, *children]))
    llm.shutdown(timeout=GRACE_S)
    kill_stopped(children)
    remove_segments(segments)


def end_processes(engine: EngineProcesses) -> list[int]:
    """Kill the remaining processes of an engine on this machine, and free their shared memory.

    Returns:
        Pids of the processes that still exist after `END_S`.
    """
    family: set[psutil.Process] = set()
    for pid, started in engine.started:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == started:
                family |= {process, *process.children(recursive=True)}
    segments = set().union(*(find_shared_files(process, killed=True) for process in family))
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + END_S
    while (left := [process.pid for process in family if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    remove_segments(segments)
    return left
