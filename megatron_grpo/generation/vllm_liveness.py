"""Calls of vLLM's processes, which may end under them: who waits is told so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_grpo.config.errors import EngineLostError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Result = TypeVar("Result")

DEATH_CHECK_S = 1.0
"""Seconds between two looks at whether vLLM's processes are still there, while they are waited for."""


async def while_alive(llm: AsyncLLM, call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a call of vLLM's processes, which vLLM itself awaits forever when they end under it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(call)
    while not (await asyncio.wait({task}, timeout=DEATH_CHECK_S))[0]:
        if llm.errored:
            task.cancel()
            raise EngineDeadError
    return task.result()


@contextmanager
def deaths_explained() -> Iterator[None]:
    """Let calls of vLLM's processes raise EngineLostError when one has ended, in whatever way that shows."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineLostError("a vLLM process of this engine has ended") from None
    except (RuntimeError, ValueError):
        raise
    except Exception as error:  # noqa: BLE001 - a call that a process ends under raises just that
        raise EngineLostError(f"a vLLM process of this engine failed: {error}") from None
