"""Lines that say what a command or a run waits for, when nothing else is shown for a while."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_grpo.cluster.overdue import ProcessStatus, describe_activity, read_statuses
from megatron_grpo.cluster.phases import SERVE, THIS_PROCESS
from megatron_grpo.cluster.process_log import find_current_log

FIRST_S = 15.0  # silence before the first line; each further line comes after twice the time of the last
LOOK_S = 1.0  # between two looks at the clock
USUAL_STEPS = 2.0  # a step is late after this many times the seconds of the last
MAX_PROCESSES = 2  # most processes that a line describes


class WaitNotices:
    """A thread that says what is waited for in long silences."""

    def __init__(self, say: Callable[[str], None], *, first_s: float = FIRST_S) -> None:
        self._say, self._first_s = say, first_s
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._next_s = first_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wait notices", daemon=True)
        self._thread.start()

    def restart(self, usual_s: float = 0.0) -> None:
        """Begin a new silence, of which `usual_s` are expected."""
        with self._lock:
            self._since, self._next_s = time.monotonic(), max(self._first_s, USUAL_STEPS * usual_s)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(LOOK_S, self._first_s)):
            with self._lock:
                waited_s = time.monotonic() - self._since
                is_due = waited_s >= self._next_s
                if is_due:
                    self._next_s *= 2
            if is_due:
                self._say(describe_wait(waited_s))


@contextmanager
def announce_waits() -> Iterator[None]:
    """Say on standard error what a command waits for, during the body."""
    notices = WaitNotices(lambda text: print(f"waiting: {text}", file=sys.stderr, flush=True))
    try:
        yield
    finally:
        notices.close()


def describe_wait(waited_s: float) -> str:
    """Describe the phases of this process, and what others do meanwhile.

    Processes that hang come first, then those that are in a phase for longest.
    """
    names = dict.fromkeys(phase.name for phase in THIS_PROCESS.list_active())
    text = f"{waited_s:.0f} s so far" + (f", in {', '.join(names)}" if names else "")
    log = find_current_log()
    if log is None:
        return text
    statuses = read_statuses(log)
    described = [status for status in statuses if status.is_hanging]
    if not described:
        described = sorted((status for status in statuses if _is_at_work(status)), key=_read_begin)
    return "".join([text, *(f"; {_describe(status)}" for status in described[:MAX_PROCESSES])])


def _is_at_work(status: ProcessStatus) -> bool:
    # A process that serves is in that phase for longest, and others wait for its callers.
    return any(phase.name != SERVE for phase in status.heartbeat.phases)


def _read_begin(status: ProcessStatus) -> float:
    return min(phase.since for phase in status.heartbeat.phases)


def _describe(status: ProcessStatus) -> str:
    return str(status) if status.is_hanging else f"{status.heartbeat.name} {describe_activity(status.heartbeat)}"
