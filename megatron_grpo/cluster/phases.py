"""Phases of a process: `with phase("train"):` records its body."""

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
from typing import Any, TypeVar, cast

from megatron_grpo.cluster.spans import SpanRecorder

logger = logging.getLogger(__name__)

SERVE = "serve"  # phase of a process that serves others, from its start to its end
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase that a process is in."""

    name: str
    since: float  # seconds since the epoch, of the oldest of `count` concurrent calls
    count: int = 1


class Phases:
    """The phases of this process, which any thread or coroutine enters."""

    def __init__(self) -> None:
        # Also held during a fork: if another thread held it then, it would stay locked in the child.
        self.lock = threading.Lock()
        self._active: dict[object, tuple[str, float]] = {}  # in the order of entering
        self.idle_since = time.time()
        self.last_phase: str | None = None
        self.on_enter: Callable[[], None] | None = None  # called each time a phase is entered
        self.spans: SpanRecorder | None = None  # records the phases of a process that has a log

    def enter(self, name: str) -> object:
        """Begin a phase; return the token for `leave`."""
        token, now = object(), time.time()
        with self.lock:
            self._active[token] = (name, now)
        if self.spans is not None:
            self.spans.enter(name, now)
        if self.on_enter is not None:
            self.on_enter()
        return token

    def leave(self, token: object) -> None:
        """End the phase of this token."""
        with self.lock:
            name, _ = self._active.pop(token, (None, 0.0))  # absent if the process was forked within the phase
            if not self._active:
                self.idle_since, self.last_phase = time.time(), name
        if self.spans is not None and name is not None:
            self.spans.leave(name, time.time())

    def reset_child(self) -> None:
        """Reset a forked process, which still holds the lock."""
        # It is in no phase of its parent and must not write its parent's heartbeat.
        self._active.clear()
        self.idle_since, self.last_phase, self.on_enter = time.time(), None, None
        self.spans = None
        self.lock.release()

    def list_active(self) -> tuple[Phase, ...]:
        """List the active phases, oldest first, with counts of concurrent calls."""
        phases: dict[str, Phase] = {}
        with self.lock:
            for name, since in self._active.values():
                first = phases.get(name)
                phases[name] = Phase(name, since) if first is None else Phase(name, first.since, first.count + 1)
        return tuple(phases.values())


THIS_PROCESS = Phases()
os.register_at_fork(
    before=THIS_PROCESS.lock.acquire, after_in_parent=THIS_PROCESS.lock.release, after_in_child=THIS_PROCESS.reset_child
)


class phase(ContextDecorator):  # noqa: N801  # used like a function
    """Record the phase `name` while the body runs.

    It also decorates functions, including `async` ones. It costs some microseconds: use it for a call, not for each
    token. Concurrent coroutines may each be in a phase. If the body raises, the traceback is logged.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._token: object = None
        self._began = 0.0

    def __enter__(self) -> None:
        logger.debug("%s: begins", self._name)
        self._began = time.perf_counter()
        self._token = THIS_PROCESS.enter(self._name)

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        THIS_PROCESS.leave(self._token)
        seconds = time.perf_counter() - self._began
        if isinstance(error, Exception):
            logger.error("%s: failed after %.3f s", self._name, seconds, exc_info=error)
        else:
            logger.debug("%s: took %.3f s", self._name, seconds)

    def _recreate_cm(self) -> phase:
        return phase(self._name)  # every call of a decorated function is a separate phase

    def __call__(self, function: Function) -> Function:
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def run_in_phase(*args: Any, **kwargs: Any) -> Any:
            with phase(self._name):
                return await function(*args, **kwargs)

        return cast("Function", run_in_phase)
