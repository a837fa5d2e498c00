"""Imports a reward function, checks its parameters, and calls it with a time limit."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_grpo.config.errors import RunError


class TimeLimitError(TimeoutError):
    """The limit of `time_limit` has passed; other timeouts of the body stay TimeoutError."""


class _TimeLimitPassed(BaseException):
    """Raised inside the code that took too long, where `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeLimitError when the body takes longer. Main thread only, where Python delivers signals.

    SIGUSR2 is used, since reward functions use SIGALRM themselves (math-verify does). A call that never returns to
    the interpreter is not interrupted; the deadline of the whole process ends it.

    Args:
        seconds: limit; None: there is none.
    """
    if seconds is None:
        yield
        return
    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR2, _raise_in_body)
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # after this nothing is sent any more
    except _TimeLimitPassed:
        raise TimeLimitError from None
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)


def _raise_in_body(signum: int, frame: FrameType | None) -> None:
    raise _TimeLimitPassed


RewardFunction = Callable[..., Any]
"""(prompts=, completions=, and each column of the data=) -> one reward per completion, None where it has no opinion; or
a coroutine of that."""

PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments that are passed to every function that takes them, beside the columns of the data."""


class RewardError(RunError):
    """A reward function raised, took too long, or returned no list of rewards."""

    timed_out = False
    """Whether the function took too long."""


Outcome = list[float | None] | RewardError
"""The rewards of a function, or its failure."""


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function and its parameters."""

    function: RewardFunction
    path: str
    """Module and name of the function, for messages."""
    accepts: frozenset[str] | None
    """Names that it takes; None: any."""
    requires: frozenset[str]
    """Columns without a default in its signature."""

    @classmethod
    def of(cls, function: RewardFunction) -> RewardCall:
        """A function or an object that can be called."""
        name = getattr(function, "__qualname__", type(function).__name__)
        path = f"{getattr(function, '__module__', '?')}.{name}"
        return cls(function, path, _accepted(function), frozenset(one.name for one in _required(function)) - {*PASSED})

    def attempt(
        self, arguments: Mapping[str, Any], count: int, timeout_s: float | None
    ) -> Outcome | Coroutine[Any, Any, Outcome]:
        """The rewards of `count` completions, or the function's failure; a coroutine of that if the function is async.

        Main thread only.
        """
        try:
            with time_limit(timeout_s):
                given = self.function(**self._taken(arguments, count))
            if inspect.isawaitable(given):
                return self._awaited(given, count, timeout_s)
            return self._rewards(given, count)
        except TimeLimitError:
            return self._timed_out(timeout_s)
        except RewardError as failure:
            return failure
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it becomes the failure
            return self._raised(error)

    async def _awaited(self, given: Awaitable[Any], count: int, timeout_s: float | None) -> Outcome:
        """The result of an async function, which is cancelled when it takes too long."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                rewards = await given
            return self._rewards(rewards, count)
        except RewardError as failure:
            return failure
        except Exception as error:  # noqa: BLE001 - as in `attempt`
            return self._timed_out(timeout_s) if limit.expired() else self._raised(error)

    def _taken(self, arguments: Mapping[str, Any], count: int) -> dict[str, Any]:
        """The arguments that the function takes; a column that none of these `count` rows has is None in each."""
        taken = {name: value for name, value in arguments.items() if self.accepts is None or name in self.accepts}
        return {name: [None] * count for name in self.requires} | taken

    def _rewards(self, given: Any, count: int) -> list[float | None]:
        if not isinstance(given, Iterable):
            raise RewardError(f"{self.path} gave {type(given).__name__}, and no list of rewards")
        rewards = list(given)
        if len(rewards) != count:
            raise RewardError(f"{self.path} gave {len(rewards)} rewards for {count} completions")
        try:
            return [None if reward is None else float(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            text = f"{self.path} gave something that is neither a number nor None: {error}"
            raise RewardError(text) from error

    def _timed_out(self, timeout_s: float | None) -> RewardError:
        failure = RewardError(f"{self.path} gave no rewards within reward_timeout_s={timeout_s:g} s")
        failure.timed_out = True
        return failure

    def _raised(self, error: Exception) -> RewardError:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        failure = RewardError(f"{self.path} raised {type(error).__name__}: {error} ({where})")
        failure.__cause__ = error
        return failure


def load_reward_function(path: str) -> RewardFunction:
    """The function or object at an import path (package.module.name); for a class, an instance of it.

    Raises:
        RunError: there is no such module or name, its module fails, or it cannot be called with prompts and
            completions by name.
    """
    try:
        function = _found(path)
        function = function() if inspect.isclass(function) else function
    except Exception as error:  # whatever the user's module raises while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"reward function {path} cannot be imported: {reason}") from error
    if not callable(function):
        raise RunError(f"reward function {path} is {type(function).__name__}, which cannot be called")
    loaded: RewardFunction = function
    unfit = not_callable_by_name(path, loaded)
    if unfit is not None:
        raise RunError(unfit)
    return loaded


def not_callable_by_name(path: str, function: RewardFunction) -> str | None:
    """The problem of a function that cannot be called with prompts and completions by name; None: it can.

    Args:
        path: the function's import path, for the message.
        function: the function.
    """
    text = f"reward function {path} must take prompts and completions by name (or **kwargs)"
    own = _required(function, of_wrapped=False)  # a wrapper may well turn names into positions
    unnamed = [one.name for one in own if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    if unnamed:
        return f"{text}; it takes {', '.join(unnamed)} by position only: leave the / out of its parameters"
    accepts = _accepted(function)
    if accepts is not None and not accepts & {"prompts", "completions", "completion_ids"}:
        return f"{text}; it takes {', '.join(sorted(accepts)) or 'nothing'}"
    return None


def missing_columns(path: str, function: RewardFunction, columns: Collection[str]) -> str | None:
    """The problem of a function that needs a column which the data lacks; None: it has all.

    Args:
        path: the function's import path, for the message.
        function: the function.
        columns: names of all columns of the rows that it will score.
    """
    lacking = [one.name for one in _required(function) if one.name not in PASSED and one.name not in columns]
    if not lacking:
        return None
    there = ", ".join(sorted(columns)) or "none"
    return f"reward function {path} takes {', '.join(lacking)}, and the data has no such column; it has {there}"


def _found(path: str) -> Any:
    """The object at a path, which may also be an attribute of an object in a module."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        outer, _, holder = module.rpartition(".")
        if not outer or error.name != module:
            raise
        return getattr(getattr(importlib.import_module(outer), holder), name)


def _parameters(function: RewardFunction, of_wrapped: bool = True) -> Sequence[inspect.Parameter] | None:
    """The parameters of a function, or of the one that it wraps; None: it has no signature."""
    try:
        return list(inspect.signature(function, follow_wrapped=of_wrapped).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _accepted(function: RewardFunction) -> frozenset[str] | None:
    """Names that a function takes; None: any, or it has no signature."""
    parameters = _parameters(function)
    if parameters is None or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(one.name for one in parameters if one.kind in by_name)


def _required(function: RewardFunction, of_wrapped: bool = True) -> Iterator[inspect.Parameter]:
    for one in _parameters(function, of_wrapped) or ():
        variadic = one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if not variadic and one.default is inspect.Parameter.empty:
            yield one
