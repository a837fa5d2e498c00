"""Heartbeats: a small file per process with its current phase.

People, the driver and other nodes read the files. A file holds one JSON object padded to RECORD_BYTES and is rewritten
in place: one open, write and close a beat. NFS shows a write to other nodes once the file is closed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import socket
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from megatron_grpo.cluster.phases import THIS_PROCESS, Phase
from megatron_grpo.cluster.spans import SPANS_FOLDER, SpanRecorder

HEARTBEATS_FOLDER = "heartbeats"  # folder of the heartbeat files, inside the folder of the logs

BEAT_S = 1.0  # seconds between two beats of a process that stays in its phase, on one machine
SHARED_BEAT_S = 5.0  # the same on several machines, whose thousands of processes write to one file server
BEAT_VARIABLE = "MEGATRON_GRPO_BEAT_S"  # environment variable with these seconds, for the driver's processes

# Rate limit of the writes when phases are entered (a token bucket); further phases wait for the next beat.
BURST, WRITES_PER_S = 20, 10.0
RECORD_BYTES = 1024
SHOWN_PHASES = 4  # most phases in a record, oldest first
FROZEN_S = 10.0  # seconds without a beat after which a process logs its stacks: C code is holding the interpreter

logger = logging.getLogger(__name__)
_timer_lock = threading.Lock()  # held while faulthandler's timer is set, and while the process forks


def read_beat_s() -> float:
    """Read the seconds between two beats of a process."""
    return float(os.environ.get(BEAT_VARIABLE, BEAT_S))


def _stop_timer_before_fork() -> None:
    # The timer is a C thread whose locks would stay held in a forked process; the next beat sets it again.
    _timer_lock.acquire()
    faulthandler.cancel_dump_traceback_later()


os.register_at_fork(
    before=_stop_timer_before_fork, after_in_parent=_timer_lock.release, after_in_child=_timer_lock.release
)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last record of a process; times in seconds since the epoch."""

    name: str
    pid: int
    host: str
    machine: str  # the machine or container within which the pid is valid
    beat: float  # time of writing, on the clock of the process's machine
    phases: tuple[Phase, ...]  # current ones, outermost first; empty: the process waits for work
    idle_since: float  # end of `last_phase`
    last_phase: str | None


def build_file_stem(name: str) -> str:
    """Build the name of a process's files: "policy rank 0" -> "policy_rank_0"."""
    return re.sub(r"[^\w.-]+", "_", name.strip()).lower()


def identify_machine() -> str:
    """Identify the machine or container in which this process's pid is valid."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class HeartbeatWriter:
    """Writes this process's heartbeat, and stacks on request into its open log."""

    def __init__(self, folder: Path, name: str, log: TextIO) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{build_file_stem(name)}.json"
        self._requests = build_requests_path(folder, name)
        for file in (self._path, self._requests):
            if os.path.lexists(file) and not stat.S_ISREG(os.lstat(file).st_mode):
                file.unlink()  # in a folder from elsewhere, such as a link to a file of the user's
        self._requests.write_bytes(b"")
        self._answered = 0
        self._spans = SpanRecorder(folder.parent / SPANS_FOLDER, build_file_stem(name))
        self._name, self._log, self._beat_s = name, log, read_beat_s()
        self._host, self._machine = socket.gethostname(), identify_machine()
        self._lock = threading.Lock()
        self._tokens, self._tokens_at = float(BURST), time.monotonic()
        self._problem = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first record and keep beating."""
        self._write()
        THIS_PROCESS.on_enter, THIS_PROCESS.spans = self._write_new_phase, self._spans
        self._thread.start()

    def stop(self) -> None:
        """Stop writing; idempotent."""
        THIS_PROCESS.on_enter = THIS_PROCESS.spans = None
        self._spans.write(ended=True)
        with _timer_lock:  # otherwise the thread could set the timer again, after the log is closed
            self._stopped.set()
            faulthandler.cancel_dump_traceback_later()

    def _write_new_phase(self) -> None:
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._tokens_at) * WRITES_PER_S)
        self._tokens_at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            self._write()

    def _run(self) -> None:
        while True:
            # Code that holds the interpreter's lock keeps this thread from resetting the timer; the dump needs no lock.
            with _timer_lock:
                if self._stopped.is_set():
                    return
                faulthandler.dump_traceback_later(FROZEN_S, file=self._log)
            if self._stopped.wait(self._beat_s):
                return
            self._write()
            self._spans.write()
            with suppress(OSError), self._requests.open("rb") as file:
                size = os.fstat(file.fileno()).st_size  # of the open file: NFS looks at the server only at an open
                if size > self._answered:
                    self._answered = size
                    logger.warning("the driver asks where this process is; the stacks of its threads:")
                    faulthandler.dump_traceback(file=self._log, all_threads=True)

    def _write(self) -> None:
        record = Heartbeat(
            name=self._name,
            pid=os.getpid(),
            host=self._host,
            machine=self._machine,
            beat=time.time(),
            phases=THIS_PROCESS.list_active()[:SHOWN_PHASES],
            idle_since=THIS_PROCESS.idle_since,
            last_phase=THIS_PROCESS.last_phase,
        )
        line = (json.dumps(asdict(record)).ljust(RECORD_BYTES - 1) + "\n").encode()
        with self._lock:
            try:
                # One write over bytes of nearly always this length, so that readers find the old bytes or the new.
                with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0) as file:
                    file.write(line)
                    file.truncate()  # changes something only after a record of very long names
                self._problem = ""
            except OSError as error:  # a full or vanished disk does not end the run
                if str(error) != self._problem:
                    logger.warning("the heartbeat cannot be written: %s", error)
                self._problem = str(error)


def build_requests_path(folder: Path, name: str) -> Path:
    """Build the path of the file in which a byte requests stacks."""
    return folder / f"{build_file_stem(name)}.requests"


def read_heartbeats(folder: Path) -> dict[str, Heartbeat]:
    """Read the last valid heartbeats of all processes, by name."""
    heartbeats = filter(None, map(_read_heartbeat, sorted(folder.glob("*.json"))))
    return {heartbeat.name: heartbeat for heartbeat in heartbeats}


def read_heartbeat(folder: Path, name: str) -> Heartbeat | None:
    """Read the last heartbeat of a process; None: it has none that is valid."""
    return _read_heartbeat(folder / f"{build_file_stem(name)}.json")


def _read_heartbeat(path: Path) -> Heartbeat | None:
    for _ in range(3):  # again, if the file was being written
        try:
            fields = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            time.sleep(0.01)
        else:
            fields["phases"] = tuple(Phase(**phase) for phase in fields["phases"])
            return Heartbeat(**fields)
    return None
