"""What a process is doing right now: `with phase("train"):` around it, in any thread and any coroutine."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing that a process is doing."""

    name: str
    since: float
    """When it was entered, in seconds since the epoch; of `count` at once, the first that is still there."""
    count: int = 1
    """How often the process is in it right now: more than once where calls run side by side."""


class Phases:
    """The phases that this process is in; any thread and any coroutine may enter one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[object, tuple[str, float]] = {}  # in the order of entering
        self.idle_since = time.time()
        self.last_phase: str | None = None
        self.on_enter: Callable[[], None] | None = None
        """Called after each phase that is entered."""

    def enter(self, name: str) -> object:
        """Begin a phase; what `leave` wants back."""
        token = object()
        with self._lock:
            self._active[token] = (name, time.time())
        if self.on_enter is not None:
            self.on_enter()
        return token

    def leave(self, token: object) -> None:
        """End the phase that `enter` returned this for."""
        with self._lock:
            name, _ = self._active.pop(token, (None, 0.0))  # nothing there: the process was forked within the phase
            if not self._active:
                self.idle_since, self.last_phase = time.time(), name

    def before_fork(self) -> None:
        """Keep other threads out: what one of them holds while a process is forked nobody gives back in the child."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """Let other threads in again."""
        self._lock.release()

    def forget(self) -> None:
        """Leave a forked process in none of its parent's phases, and without its parent's record to write."""
        self._active.clear()
        self.idle_since, self.last_phase, self.on_enter = time.time(), None, None
        self._lock.release()

    def current(self) -> tuple[Phase, ...]:
        """The phases that the process is in, first entered first; calls in the phase of another are counted with it."""
        found: dict[str, Phase] = {}
        with self._lock:
            for name, since in self._active.values():
                first = found.get(name)
                found[name] = Phase(name, since) if first is None else Phase(name, first.since, first.count + 1)
        return tuple(found.values())


THIS_PROCESS = Phases()
os.register_at_fork(
    before=THIS_PROCESS.before_fork, after_in_parent=THIS_PROCESS.after_fork, after_in_child=THIS_PROCESS.forget
)


class PhaseScope(ContextDecorator):
    """What `phase` returns: usable as `with phase("train"):` and as a decorator of functions, `async` ones included."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._token: object = None
        self._began = 0.0

    def __enter__(self) -> None:
        logger.debug("%s: begins", self._name)
        self._began = time.perf_counter()
        self._token = THIS_PROCESS.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        THIS_PROCESS.leave(self._token)
        seconds = time.perf_counter() - self._began
        if isinstance(error, Exception):
            logger.error("%s: failed after %.3f s", self._name, seconds, exc_info=error)
        else:
            logger.debug("%s: took %.3f s", self._name, seconds)

    def _recreate_cm(self) -> PhaseScope:
        # Of a decorator: every call is a phase of its own.
        return PhaseScope(self._name)

    def __call__(self, function: Function) -> Function:
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with PhaseScope(self._name):
                return await function(*args, **kwargs)

        return cast("Function", inside)


def phase(name: str) -> PhaseScope:
    """Say that this process is in the phase `name` while the body runs; at debug level its log gets two lines.

    It costs some microseconds, so that a call may have one, but not a token. Coroutines that run side by side may each
    be in one. A body that raises leaves its traceback in the log.
    """
    return PhaseScope(name)
