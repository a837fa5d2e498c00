"""The processes of an engine: calls that notice when one ends, and ending all, from the actor or from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import ray

from megatron_grpo.cluster.cleanup import find_shared_files, is_alive, kill_stopped, remove_segments
from megatron_grpo.config.errors import EngineLostError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Result = TypeVar("Result")

DEATH_CHECK_S = 1.0  # between two checks, during a call, that vLLM's processes still live
END_S = 20.0  # for killed processes to disappear; a process inside a device driver's call ends when it returns
POLL_S = 0.05
GRACE_S = 5.0  # for vLLM's processes to end by themselves, since killed ones leave shared memory behind


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """The processes of one engine on the machine of its actor."""

    node: str  # Ray's name of the machine
    started: tuple[tuple[int, float], ...]
    """Pid and start time (seconds since the epoch) of each process; the time is needed because pids are reused."""


async def await_alive(llm: AsyncLLM, call: Coroutine[Any, Any, Result]) -> Result:
    """Await a call; EngineLostError if a process ends meanwhile."""
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(call)
    with death_as_engine_loss():
        # vLLM itself would wait for ever if a process ended during the call.
        while not (await asyncio.wait({task}, timeout=DEATH_CHECK_S))[0]:
            if llm.errored:
                task.cancel()
                raise EngineDeadError
        return task.result()


@contextmanager
def death_as_engine_loss() -> Iterator[None]:
    """Turn vLLM's errors about ended processes into EngineLostError."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineLostError("a vLLM process of this engine has ended") from None
    except (RuntimeError, ValueError):
        raise
    except Exception as error:  # noqa: BLE001 - a call whose process ends raises a bare Exception
        raise EngineLostError(f"a vLLM process of this engine failed: {error}") from None


def list_own_processes() -> EngineProcesses:
    actor, started = psutil.Process(), []
    for process in [actor, *actor.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            started.append((process.pid, process.create_time()))
    return EngineProcesses(ray.get_runtime_context().get_node_id(), tuple(started))


def end_child_processes(llm: AsyncLLM) -> None:
    """End the actor's children, and free their shared memory."""
    actor = psutil.Process()
    children = actor.children(recursive=True)
    # The memory that processes share can be listed only while they live.
    segments = set().union(*(find_shared_files(process) for process in [actor, *children]))
    llm.shutdown(timeout=GRACE_S)
    kill_stopped(children)
    remove_segments(segments)


def end_processes(engine: EngineProcesses) -> list[int]:
    """Kill an engine's processes here; returns pids that survive."""
    family: set[psutil.Process] = set()
    # A pid may belong to another process by now; the start time tells.
    for pid, started in engine.started:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == started:
                family |= {process, *process.children(recursive=True)}
    segments = set().union(*(find_shared_files(process, with_semaphores=True) for process in family))
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + END_S
    while (alive := [process.pid for process in family if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    remove_segments(segments)
    return alive
