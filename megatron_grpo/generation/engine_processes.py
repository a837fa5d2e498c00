"""Calls of an engine that notice when one of its processes ends, and the end of its own processes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from megatron_grpo.cluster.cleanup import find_shared_files, kill_stopped, remove_segments
from megatron_grpo.config.errors import EngineLostError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Result = TypeVar("Result")

DEATH_CHECK_S = 1.0  # between two checks, during a call, that vLLM's processes still live
GRACE_S = 5.0  # for vLLM's processes to end by themselves, since killed ones leave shared memory behind


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


def end_child_processes(llm: AsyncLLM) -> None:
    """End the actor's children, and free their shared memory."""
    actor = psutil.Process()
    children = actor.children(recursive=True)
    # The memory that processes share can be listed only while they live.
    segments = set().union(*(find_shared_files(process) for process in [actor, *children]))
    llm.shutdown(timeout=GRACE_S)
    kill_stopped(children)
    remove_segments(segments)
