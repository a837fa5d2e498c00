"""A time limit on code of the user's that this process runs itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class LateError(TimeoutError):
    """The limit of `time_limit` has passed, and not one of the body's own."""


class _Late(BaseException):
    """Raised inside the code that took too long; no `except Exception` there keeps it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise LateError when the body takes longer. Main thread only, where Python delivers signals.

    SIGUSR2 is used, since reward functions use SIGALRM themselves (math-verify does). A call that never comes back to
    the interpreter is not interrupted; the deadline of the whole process is what ends it.

    Args:
        seconds: limit; None: there is none.
    """
    if seconds is None:
        yield
        return
    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR2, _raise_late)
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # after this nothing is sent any more
    except _Late:
        raise LateError from None
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)


def _raise_late(signum: int, frame: FrameType | None) -> None:
    raise _Late
