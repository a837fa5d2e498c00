"""Runs a coroutine in time that passes at once: deadlines that no busy machine misses, and nobody waits for.

For scenes that are all in the event loop. Its clock stands still while something can go on, and otherwise jumps to the
next deadline; functions for threads run in the loop.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def pass_time(timeout: float | None = None) -> Any:
            events = select(0)
            if not events:
                assert timeout is not None, "nothing is left that could wake this scene"
                self._seconds += timeout
            return events

        selector.select = pass_time

    def time(self) -> float:
        return self._seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # goes to whoever waits, as from a thread
            future.set_exception(error)
        return future


def run_at_once(scene: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns."""
    return asyncio.run(scene, loop_factory=_VirtualTimeLoop)
