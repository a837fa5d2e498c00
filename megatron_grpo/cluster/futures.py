"""Waiting for remote work with a deadline, and turning what went wrong into one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from megatron_grpo.config.errors import RunError


def gather(
    refs: Sequence[ray.ObjectRef], *, deadline_s: float, what: str, name: Callable[[int], str] = "rank {}".format
) -> list[Any]:
    """Results of `refs` in their order, failing as soon as the first one fails.

    Args:
        refs: remote calls of one phase.
        deadline_s: seconds for all of them together.
        what: the phase, for messages ("training step").
        name: how to call the worker behind refs[i].

    Raises:
        RunError: a worker died, its call raised, or the deadline passed; says which worker and why.
    """
    end = time.monotonic() + deadline_s
    index = {ref: i for i, ref in enumerate(refs)}
    results: dict[ray.ObjectRef, Any] = {}
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not done:
            waiting = ", ".join(name(index[ref]) for ref in pending)
            raise RunError(f"{what}: no answer from {waiting} within {deadline_s:g} s")
        try:
            results[done[0]] = ray.get(done[0])
        except RayError as error:
            raise RunError(f"{what}: {name(index[done[0]])} {explain(error)}") from error
    return [results[ref] for ref in refs]


def explain(error: Exception) -> str:
    """What happened to a remote call, in one line."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"failed with {type(cause).__name__}: {cause}" if cause is not None else f"failed: {error}"
    if isinstance(error, RayActorError):
        return "died (its process is gone)"
    if isinstance(error, OutOfMemoryError):
        return f"was ended by Ray because its node ran out of memory: {error}"
    if isinstance(error, GetTimeoutError):
        return "did not answer in time"
    return f"failed: {error}"
