"""Logical actors: thousands of them in a few processes of Ray, under handles that are used like Ray's own.

`LogicalRay` takes the place of the name `ray` in a module of the driver, whose code stays as it is. It makes an actor
of a listed class in one of the hosts, which are Ray actors. A call of a logical actor is one call of its host: one
task, with the same arguments and the same references to its results as the call of an actor of its own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from types import ModuleType
from typing import Any
from unittest.mock import patch

import ray

from megatron_grpo.cluster.process_log import begin_process_log

AT_ONCE = 1_000_000
"""Most calls that a host runs at once: all that come."""

_calls, _numbers = count(), count()


def calls_made() -> int:
    """Number of calls of logical actors that this process has made so far."""
    return int(repr(_calls)[len("count(") : -1])


class Host:
    """Ray actor with many logical actors, by number."""

    def __init__(self, name: str) -> None:
        begin_process_log(name)
        self._actors: defaultdict[int, asyncio.Future[Any]] = defaultdict(lambda: asyncio.Future())
        """By number; a call may overtake the one that makes its actor, and then waits for it."""

    async def make(self, number: int, kind: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make a logical actor."""
        try:
            self._actors[number].set_result(kind(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by every call of the actor
            self._actors[number].set_exception(error)

    async def call(self, number: int, method: str, *args: Any) -> Any:
        """Call a method of a logical actor, which may be a coroutine."""
        answer = getattr(await self._actors[number], method)(*args)
        return await answer if inspect.isawaitable(answer) else answer

    async def stream(self, number: int, method: str, *args: Any) -> AsyncIterator[Any]:
        """Call a method of a logical actor that is an asynchronous generator."""
        async for output in getattr(await self._actors[number], method)(*args):
            yield output

    async def end(self, number: int) -> None:
        """End a logical actor; one that has a method `die` is told."""
        actor = await self._actors.pop(number)
        if hasattr(actor, "die"):
            actor.die()


def start_hosts(number: int) -> list[Any]:
    """Start hosts, as Ray actors."""
    kind = ray.remote(num_cpus=0, max_concurrency=AT_ONCE)(Host)
    return [kind.remote(f"host {index}") for index in range(number)]


@dataclass(frozen=True, slots=True)
class LogicalMethod:
    """A method of a logical actor, like `ray.actor.ActorMethod`."""

    host: Any
    number: int
    name: str
    results: int | str = 1
    """Number of references that a call returns; "streaming": a generator of references."""

    def options(self, *, num_returns: int | str) -> LogicalMethod:
        """The method with other options."""
        return LogicalMethod(self.host, self.number, self.name, num_returns)

    def remote(self, *args: Any) -> Any:
        """Call the method; returns the reference or references to its results."""
        next(_calls)
        method = self.host.stream if self.results == "streaming" else self.host.call
        if self.results != 1:
            method = method.options(num_returns=self.results)
        return method.remote(self.number, self.name, *args)


class LogicalActor:
    """Handle of a logical actor; can be sent to other actors."""

    def __init__(self, host: Any, number: int) -> None:
        self._host, self._number = host, number

    def __getattr__(self, name: str) -> LogicalMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return LogicalMethod(self._host, self._number, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LogicalActor, (self._host, self._number)


@dataclass(frozen=True, slots=True)
class LogicalClass:
    """A class whose actors are logical, like `ray.actor.ActorClass`."""

    kind: Callable[..., Any]
    hosts: Iterator[Any]
    """The hosts of its actors, in turn."""

    def options(self, **_: Any) -> LogicalClass:
        """The class itself: its actors have no resources of their own."""
        return self

    def remote(self, *args: Any, **kwargs: Any) -> LogicalActor:
        """Make an actor in the next host."""
        host, number = next(self.hosts), next(_numbers)
        host.make.remote(number, self.kind, args, kwargs)
        return LogicalActor(host, number)


class LogicalRay:
    """The module `ray` for the driver's code, with logical actors of some classes.

    Actors that call others have hosts of their own: two runs with streams between actors of one process
    ended or hung, for a reason that is not known.

    Args:
        hosts: the processes that share the logical actors, from `start_hosts`, at least two.
        kinds: by class of actors, what is made in the place of one of them.
        callers: the classes of which the actors call other logical actors.
    """

    def __init__(
        self, hosts: Sequence[Any], kinds: Mapping[type, Callable[..., Any]], callers: Collection[type]
    ) -> None:
        half = len(hosts) // 2
        assert half, "callers and others need a host each"
        of_callers, of_others = cycle(hosts[:half]), cycle(hosts[half:])
        self._kinds = {
            kind: (make_kind, of_callers if kind in callers else of_others) for kind, make_kind in kinds.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def remote(self, kind: Any = None, **options: Any) -> Any:
        """As `ray.remote`, of a class or function, or with options as a decorator."""
        if kind is None:
            return lambda decorated: self._remote(decorated, options)
        return self._remote(kind, options)

    def _remote(self, kind: Any, options: Mapping[str, Any]) -> Any:
        if kind in self._kinds:
            return LogicalClass(*self._kinds[kind])
        return ray.remote(**options)(kind) if options else ray.remote(kind)

    def kill(self, actor: Any) -> None:
        """As `ray.kill`."""
        if isinstance(actor, LogicalActor):
            actor._host.end.remote(actor._number)
        else:
            ray.kill(actor)

    @contextmanager
    def in_place_of_ray(self, modules: Sequence[ModuleType]) -> Iterator[None]:
        """Let this object stand for `ray` in some modules while the body runs."""
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(patch.object(module, "ray", self))
            yield
