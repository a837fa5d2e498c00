"""Making one line of what Megatron-Core, torch and pickle raise for files that are damaged or of another model."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_grpo.config.errors import RunError

_ERRORS = (
    CheckpointingException,
    CheckpointException,
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def errors_told(what: str) -> Iterator[None]:
    """Around reading or writing a distributed checkpoint.

    Args:
        what: begins the line: which folder cannot be loaded, or written.

    Raises:
        RunError: the error that was raised, told in one line; the original is the cause.
    """
    try:
        yield
    except RunError:
        raise
    except _ERRORS as error:
        first: BaseException = error
        if isinstance(error, CheckpointException):  # its text is the tracebacks of all ranks
            first = next(iter(error.failures.values()))[0]
        line = str(first).strip().partition("\n")[0]
        raise RunError(f"{what}: {type(first).__name__}: {line}") from error
