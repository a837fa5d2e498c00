"""What a process is doing, in a small file that one of its threads renews; people, the driver and other nodes read it.

A file holds one JSON object padded to RECORD_BYTES and is rewritten in place: an open, a write and a close a second,
which a shared file system carries for a thousand processes. NFS shows a write to other nodes once the file is closed.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar, cast

FOLDER = "heartbeats"
"""Folder of the heartbeat files, inside the folder of the logs."""

BEAT_S = 1.0
"""Seconds between two beats of a process that stays in its phase."""

SPACING_S = 0.1
"""A phase that is entered sooner after the last write waits for the next beat."""

RECORD_BYTES = 1024
SHOWN_PHASES = 4
"""Most phases of one process that its record lists, the oldest first."""

FROZEN_S = 10.0
"""A process that does not beat for so long writes its stacks into its log: something holds the interpreter."""

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing that a process is doing."""

    name: str
    since: float
    """When it was entered, in seconds since the epoch; of `count` at once, the first that is still there."""
    count: int = 1
    """How often the process is in it right now: more than once where calls run side by side."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a process last told about itself."""

    name: str
    pid: int
    host: str
    machine: str
    """Tells apart machines and containers: a pid means something only within one."""
    beat: float
    """When it was written, in seconds since the epoch on the clock of the process's machine."""
    phases: tuple[Phase, ...]
    """Outermost first; empty: the process waits for work."""
    idle_since: float
    """When the last phase ended, in seconds since the epoch."""


def file_stem(name: str) -> str:
    """The name of a process's files without their ending: "policy rank 0" -> "policy_rank_0"."""
    return re.sub(r"[^\w.-]+", "_", name.strip()).lower()


def this_machine() -> str:
    """What `Heartbeat.machine` holds: the boot of the kernel and the pid namespace, or the host name without them."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class Phases:
    """The phases that this process is in; any thread and any coroutine may enter one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[object, tuple[str, float]] = {}  # in the order of entering
        self.idle_since = time.time()
        self.writer: HeartbeatWriter | None = None

    def enter(self, name: str) -> object:
        """Begin a phase; what `leave` wants back."""
        token = object()
        with self._lock:
            self._active[token] = (name, time.time())
        if self.writer is not None:
            self.writer.phase_entered()
        return token

    def leave(self, token: object) -> None:
        """End the phase that `enter` returned this for."""
        with self._lock:
            self._active.pop(token, None)  # not there any more: the process was forked within it
            if not self._active:
                self.idle_since = time.time()

    def before_fork(self) -> None:
        """Keep other threads out: what one of them holds while a process is forked nobody gives back in the child.

        The clock that `HeartbeatWriter` winds up is such a thing as well, so it is stopped until the next beat.
        """
        self._lock.acquire()
        faulthandler.cancel_dump_traceback_later()

    def after_fork(self) -> None:
        """Let other threads in again."""
        self._lock.release()

    def forget(self) -> None:
        """In a forked process: it is in none of its parent's phases, and does not write its parent's record."""
        self._active.clear()
        self.idle_since, self.writer = time.time(), None
        self._lock.release()

    def wind_up(self, log: TextIO) -> None:
        """Have all stacks written into `log` unless this is called again in time."""
        with self._lock:
            faulthandler.dump_traceback_later(FROZEN_S, file=log)

    def current(self) -> tuple[Phase, ...]:
        """Those that the process is in, the first entered first; calls in the phase of another are counted with it."""
        found: dict[str, Phase] = {}
        with self._lock:
            for name, since in self._active.values():
                first = found.get(name)
                found[name] = Phase(name, since) if first is None else Phase(name, first.since, first.count + 1)
        return tuple(found.values())


_phases = Phases()
os.register_at_fork(before=_phases.before_fork, after_in_parent=_phases.after_fork, after_in_child=_phases.forget)


class PhaseScope(ContextDecorator):
    """What `phase` returns: usable as `with phase("train"):` and as a decorator of functions, `async` ones included."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._token: object = None
        self._began = 0.0

    def __enter__(self) -> None:
        logger.debug("%s: begins", self._name)
        self._began = time.perf_counter()
        self._token = _phases.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        _phases.leave(self._token)
        seconds = time.perf_counter() - self._began
        if isinstance(error, Exception):
            logger.error("%s: failed after %.3f s", self._name, seconds, exc_info=error)
        else:
            logger.debug("%s: took %.3f s", self._name, seconds)

    def _recreate_cm(self) -> PhaseScope:
        # Of a decorator: every call is a phase of its own.
        return PhaseScope(self._name)

    def __call__(self, function: Function) -> Function:
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with PhaseScope(self._name):
                return await function(*args, **kwargs)

        return cast("Function", inside)


def phase(name: str) -> PhaseScope:
    """Say that this process is in the phase `name` while the body runs; at debug level its log gets two lines.

    It costs some microseconds, so that a call may have one, but not a token. Coroutines that run side by side may each
    be in one. A body that raises leaves its traceback in the log.
    """
    return PhaseScope(name)


class HeartbeatWriter:
    """Writes this process's record until `stop`, and its stacks into its log when somebody asks or it is frozen."""

    def __init__(self, folder: Path, name: str, log: TextIO) -> None:
        """
        Args:
            folder: where heartbeat files are; made when it is missing.
            name: of this process.
            log: open file of this process's log; stacks go there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{file_stem(name)}.json"
        self._requests = requests_file(folder, name)
        self._requests.write_bytes(b"")
        self._answered = 0
        self._name, self._log = name, log
        self._host, self._machine = socket.gethostname(), this_machine()
        self._lock = threading.Lock()
        self._written = 0.0
        self._problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first record and keep beating."""
        self._write()
        _phases.writer = self
        self._thread.start()

    def stop(self) -> None:
        """Write no more; idempotent."""
        self._stopped.set()
        if _phases.writer is self:
            _phases.writer = None
        faulthandler.cancel_dump_traceback_later()

    def phase_entered(self) -> None:
        """Show a new phase at once, unless the record was written a moment ago."""
        if time.monotonic() - self._written >= SPACING_S:
            self._write()

    def _beat(self) -> None:
        while True:
            # Whoever holds the interpreter's lock for long keeps this thread from winding the clock up again. The dump
            # itself needs no lock.
            _phases.wind_up(self._log)
            if self._stopped.wait(BEAT_S):
                return
            self._write()
            self._answer_requests()

    def _write(self) -> None:
        record = Heartbeat(
            name=self._name,
            pid=os.getpid(),
            host=self._host,
            machine=self._machine,
            beat=time.time(),
            phases=_phases.current()[:SHOWN_PHASES],
            idle_since=_phases.idle_since,
        )
        data = (json.dumps(asdict(record))).ljust(RECORD_BYTES - 1) + "\n"
        with self._lock:
            self._written = time.monotonic()
            try:
                _overwrite(self._path, data.encode())
                self._problem = ""
            except OSError as error:  # a full or vanished disk: the work itself goes on
                if str(error) != self._problem:
                    logger.warning("the heartbeat cannot be written: %s", error)
                self._problem = str(error)

    def _answer_requests(self) -> None:
        try:
            with self._requests.open("rb") as file:  # not stat: NFS looks at the server only when a file is opened
                size = os.fstat(file.fileno()).st_size
        except OSError:
            return
        if size > self._answered:
            self._answered = size
            logger.warning("the driver asks where this process is; the stacks of its threads:")
            faulthandler.dump_traceback(file=self._log, all_threads=True)


def requests_file(folder: Path, name: str) -> Path:
    """The file of a process to which a byte is appended to ask for its stacks, from whatever node.

    Args:
        folder: where heartbeat files are.
        name: of the process.
    """
    return folder / f"{file_stem(name)}.requests"


def read_heartbeats(folder: Path) -> dict[str, Heartbeat]:
    """The last record of every process that has one, by name of the process.

    Args:
        folder: where heartbeat files are.
    """
    found: dict[str, Heartbeat] = {}
    for path in sorted(folder.glob("*.json")):
        heartbeat = _read(path)
        if heartbeat is not None:
            found[heartbeat.name] = heartbeat
    return found


def _read(path: Path, attempts: int = 3) -> Heartbeat | None:
    """A record; None: there is none. One that was being written is read again."""
    for _ in range(attempts):
        try:
            fields = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            time.sleep(0.01)
            continue
        return Heartbeat(**{**fields, "phases": tuple(Phase(**one) for one in fields["phases"])})
    return None


def _overwrite(path: Path, data: bytes) -> None:
    """One write at the start of a file that nearly always has this length, so that readers find old or new bytes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(file, data, 0)
        os.ftruncate(file, len(data))  # changes something only after a record of very long names
    finally:
        os.close(file)
