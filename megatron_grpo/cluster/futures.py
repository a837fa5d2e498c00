"""Remote calls: waiting with a deadline, error messages, and fast pickling."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from megatron_grpo.cluster.overdue import report_hanging, report_overdue
from megatron_grpo.cluster.phases import phase
from megatron_grpo.config.errors import CanaryError, EngineLostError, RunError

FETCH_S = 300.0  # deadline for values that are already in the object store
MAX_NAMES = 8  # most workers that a message lists by name

logger = logging.getLogger(__name__)


def gather(
    refs: Sequence[ray.ObjectRef], *, deadline_s: float, phase_name: str, name: Callable[[int], str] = "rank {}".format
) -> list[Any]:
    """Wait for the results of `refs`, or for the first failure.

    Args:
        deadline_s: seconds for all of them together.
        phase_name: the phase, for messages ("training step").
        name: function from i to the name of the worker behind refs[i], under which it also logs.

    Raises RunError if a worker died, its call raised, or the deadline passed; the message names worker and reason.
    """
    names = [name(i) for i in range(len(refs))]
    logger.debug("%s: waits up to %g s for %s", phase_name, deadline_s, join_names(names))
    with phase(phase_name):
        try:
            # One call for all, which raises at the first failure: a wait for each reference takes quadratic time.
            return list(ray.get(list(refs), timeout=deadline_s))
        except RayError:
            ready, pending = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        worker = dict(zip(refs, names, strict=True))
        pending_names = [worker[ref] for ref in pending]
        for ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                reason = f"{explain_error(error)}{report_hanging([worker[ref], *pending_names])}"
                raise RunError(f"{phase_name}: {worker[ref]} {reason}") from error
        if pending:
            raise build_overdue_error(phase_name, pending_names, deadline_s)
        return list(ray.get(list(refs)))  # all calls ended between the deadline and the check


def fetch_stored(refs: Sequence[ray.ObjectRef], content: str) -> list[Any]:
    """Fetch values that `ray.put` stored, in the order of their references.

    Raises RunError if a value was lost with its process or is overdue; the message names `content`.
    """
    try:
        return list(ray.get(list(refs), timeout=FETCH_S))
    except RayError as error:
        raise RunError(f"{content} cannot be fetched from the object store: {explain_error(error)}") from error


def build_overdue_error(phase_name: str, workers: Sequence[str], deadline_s: float) -> RunError:
    """Make overdue workers log their stacks; return an error with their phases."""
    report = report_overdue(phase_name, list(dict.fromkeys(workers)))
    return RunError(f"{phase_name}: no answer from {join_names(workers)} within {round(deadline_s, 1):g} s{report}")


def join_names(names: Sequence[str]) -> str:
    """Join the first `MAX_NAMES` different names for a message."""
    unique = list(dict.fromkeys(names))
    ending = f" and {len(unique) - MAX_NAMES} more" if len(unique) > MAX_NAMES else ""
    return ", ".join(unique[:MAX_NAMES]) + ending


def explain_error(error: Exception) -> str:
    """Say in one line why a remote call failed."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, EngineLostError):
            return f"is lost: {cause}"
        if isinstance(cause, CanaryError):
            return f"must not serve: {cause}"
        return f"failed with {type(cause).__name__}: {cause}" if cause is not None else f"failed: {error}"
    if isinstance(error, RayActorError):
        return "died (its process is gone)"
    if isinstance(error, OutOfMemoryError):
        return f"was ended by Ray because its node ran out of memory: {error}"
    if isinstance(error, GetTimeoutError):
        return "did not answer in time"
    return f"failed: {error}"


def is_lost(error: BaseException | None) -> bool:
    """True if a call failed because a process behind it is gone."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineLostError)
    return isinstance(error, RayActorError | OutOfMemoryError)


def is_canary_failure(error: BaseException | None) -> bool:
    """True if a call failed because an engine differs from the policy."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, CanaryError)


def find_lost_calls(refs: Sequence[ray.ObjectRef], wait_s: float) -> list[int]:
    """Find the indices of calls whose actor is gone."""
    # An actor whose peer died often fails before the death is known, so the other calls get wait_s seconds.
    ended = set(ray.wait(list(refs), num_returns=len(refs), timeout=wait_s)[0]) if refs else set()
    indices = []
    for index, ref in enumerate(refs):
        try:
            if ref in ended:
                ray.get(ref)
        except RayError as error:
            if is_lost(error):
                indices.append(index)
    return indices


IN_BAND_BYTES = 4096  # largest array that is copied into the pickle; larger ones travel beside it without a copy


def wrap_for_pickling(value: Any) -> Any:
    """Wrap a value so that Ray pickles it fast.

    Its large arrays arrive read-only. It must not hold object references, because Ray has to track them.
    """
    return _Pickled(value)


@dataclass(frozen=True, slots=True)
class _Pickled:
    value: Any

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        large: list[pickle.PickleBuffer] = []

        def is_in_band(buffer: pickle.PickleBuffer) -> bool:
            is_small = buffer.raw().nbytes <= IN_BAND_BYTES
            if not is_small:
                large.append(buffer)
            return is_small

        # The standard pickler: Ray's calls back into Python for every object.
        return _unpickle, (pickle.dumps(self.value, protocol=5, buffer_callback=is_in_band), *large)


def _unpickle(pickled: bytes, *large: Any) -> Any:
    return pickle.loads(pickled, buffers=large)
