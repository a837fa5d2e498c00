"""A process that outlives the driver by a few seconds and ends what the driver could not: `python -m` this module.

Ray's agents notice only after a minute that the driver was killed. The guardian holds the other end of a pipe, which
the kernel closes however the driver ends, and remembers which processes the driver had started.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

REFRESH_S = 2.0
"""How often the driver's processes are looked up while it lives."""

ALL_IS_WELL = b"."
"""What the driver writes to the pipe when it has cleaned up itself."""

GRACE_S = 4.0
"""Time that processes have to end by themselves and free what they share, once the driver is gone."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """End every process that this process starts in the body if it is killed there; else that is left to the body."""
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guardian:
        assert guardian.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                guardian.stdin.write(ALL_IS_WELL)
                guardian.stdin.close()


def main(driver: int) -> None:
    """Watch the driver until it says that all is well or is gone; in that case end what is left of its processes."""
    started: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], REFRESH_S)[0]:
        started = _family(driver, started)
    if os.read(sys.stdin.fileno(), 1) == ALL_IS_WELL:
        return
    deadline = time.monotonic() + GRACE_S
    while (left := _family(driver, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _family(driver: int, known: set[psutil.Process]) -> set[psutil.Process]:
    """Those of the known processes that live, with all their children, and all children of the driver."""
    family: set[psutil.Process] = set()
    roots = list(known)
    with contextlib.suppress(psutil.NoSuchProcess):
        roots.append(psutil.Process(driver))
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            if root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
                family |= {root, *root.children(recursive=True)}
    return {process for process in family if process.pid not in (driver, os.getpid())}


if __name__ == "__main__":
    main(int(sys.argv[1]))
