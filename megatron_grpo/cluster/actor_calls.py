"""Calls of Ray actors by the method itself, which mypy checks.

Ray's own form, `worker.hand_over.remote(complete)`, is untyped: a misspelt method or argument shows only in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import ray

Arguments = ParamSpec("Arguments")

Method = Callable[Concatenate[Any, Arguments], Any]  # a method of the actor's class or of a protocol of the class


def call_actor(
    actor: Any, method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> ray.ObjectRef:
    """Call a method of an actor: `call_actor(worker, RolloutWorker.hand_over, complete)`."""
    return getattr(actor, method.__name__).remote(*args, **kwargs)


def stream_actor(
    actor: Any, method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> ray.ObjectRefGenerator:
    """Call a method that yields; return a stream of references."""
    return getattr(actor, method.__name__).options(num_returns="streaming").remote(*args, **kwargs)


def call_actor_for_many(
    actor: Any, results: int, method: Method[Arguments], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> list[ray.ObjectRef]:
    """Call a method that returns a tuple; return a reference to each value."""
    references = getattr(actor, method.__name__).options(num_returns=results).remote(*args, **kwargs)
    return [references] if results == 1 else references
