"""Reports of overdue calls: phases in messages, stacks in logs.

faulthandler writes the stacks of running processes; py-spy, which comes with Ray, writes those of stopped ones. Neither
knows the phase of a process or reaches other machines, so heartbeat files do that (heartbeat.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_grpo.cluster import heartbeat as beats
from megatron_grpo.cluster.process_log import ProcessLog, build_log_path, find_current_log
from megatron_grpo.config.errors import to_text

SILENT_BEATS = 5.0  # age of the last heartbeat, in beats, from which a process of this machine counts as hanging
FAR_SILENT_S = 30.0  # the same for another machine: clocks may differ, and files may arrive late
MAX_DESCRIBED = 4  # most processes in a message; the driver's log lists all
SIGNAL_WAIT_S = 5.0  # most seconds for processes of this machine to write their stacks before the failed run ends them
QUIET_S = 0.2  # seconds without a new line after which the stacks in a log are complete
REQUEST_BEATS = 2.5  # beats for processes of other machines, which look for requests at every heartbeat
PY_SPY_S, PY_SPIES = 10.0, 8  # deadline of py-spy in seconds, and most stopped processes that it reads
LOG_END_BYTES = 2**18  # bytes at the end of a log that are searched for its last error
# The line of a traceback that names the exception, perhaps after the prefix of a logger.
_ERROR = re.compile(r"\b[A-Za-z_][\w.]*(Error|Exception|Interrupt): .*\S")

# States of a process according to the kernel of this machine; FAR: the process is on another machine.
STOPPED, TRACED, GONE, ALIVE, FAR = "stopped", "traced", "gone", "alive", "far"
# Descriptions of a hanging process, by its state.
_VERDICTS = {
    STOPPED: "its process is stopped (SIGSTOP)",
    TRACED: "a debugger holds its process",
    GONE: "its process is gone",
    ALIVE: "its interpreter does not respond",
    FAR: "its process or its machine hangs",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process's last heartbeat and its state."""

    heartbeat: beats.Heartbeat
    state: str  # one of STOPPED, TRACED, GONE, ALIVE and FAR
    silence_s: float  # since its last beat

    @property
    def is_hanging(self) -> bool:
        """True if the process is stuck, false if it waits."""
        if self.state in (STOPPED, TRACED, GONE):
            return True
        return self.silence_s > (FAR_SILENT_S if self.state == FAR else SILENT_BEATS * beats.read_beat_s())

    def __str__(self) -> str:
        beat = self.heartbeat
        text = f"{beat.name} (pid {beat.pid} on {beat.host}) {describe_activity(beat)}"
        if self.is_hanging or self.silence_s > 2 * beats.read_beat_s():
            text += f", last heartbeat {self.silence_s:.0f} s ago"
        return f"{text}: {_VERDICTS[self.state]}" if self.is_hanging else text


def describe_activity(beat: beats.Heartbeat) -> str:
    """Describe a process's phase: "is in phase 'train', entered 21 s ago"."""
    now = time.time()
    if not beat.phases:
        after = "" if beat.last_phase is None else f" after phase '{beat.last_phase}'"
        return f"waits for work, for {now - beat.idle_since:.0f} s{after}"
    if len(beat.phases) == 1 and beat.phases[0].count == 1:
        return f"is in phase '{beat.phases[0].name}', entered {now - beat.phases[0].since:.0f} s ago"
    counts = {phase.name: "" if phase.count == 1 else f"{phase.count} times, the first " for phase in beat.phases}
    return "is in phases " + ", ".join(
        f"'{phase.name}' ({counts[phase.name]}{now - phase.since:.0f} s ago)" for phase in beat.phases
    )


def report_overdue(phase_name: str, processes: Sequence[str]) -> str:
    """Log the states of processes and stacks of overdue ones; describe these.

    A name of a process includes its children ("generation engine 0 core"). The result ends a message; empty: no logs.
    """
    log = find_current_log()
    if log is None:
        return ""
    statuses = read_statuses(log)
    overdue = [status for status in statuses if _belongs_to(status, processes)]
    silent = [name for name in processes if not any(_belongs_to(status, [name]) for status in overdue)]
    table = "\n".join(f"  {status}" for status in statuses)
    logger.error("%s is overdue; where the processes are:\n%s", phase_name, table)
    request_stacks(log, phase_name, overdue)
    parts = _describe_statuses(overdue)
    parts += [f"{name} has not begun: it has no log" for name in silent[:MAX_DESCRIBED]]
    return "".join(f"; {part}" for part in parts) + f"; stacks are in {log.folder}"


def report_hanging(processes: Sequence[str], overdue: str | None = None) -> str:
    """Describe processes that are stopped, gone or silent, and their children, for a message.

    `overdue`: a phase that is overdue; then the processes also log their stacks.
    """
    log = find_current_log()
    if log is None:
        return ""
    hanging = [status for status in read_statuses(log) if status.is_hanging and _belongs_to(status, processes)]
    if hanging and overdue is not None:
        request_stacks(log, overdue, hanging)
    logs = (build_log_path(log.folder, status.heartbeat.name) for status in hanging if status.state == GONE)
    errors = filter(None, map(_find_last_error, logs))
    return "".join(f"; {part}" for part in (*_describe_statuses(hanging), *errors))


def _find_last_error(file: Path) -> str | None:
    with file.open("rb") as opened:
        opened.seek(-min(LOG_END_BYTES, file.stat().st_size), os.SEEK_END)
        lines = opened.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if match := _ERROR.search(line):
            return f"{file} ends with {to_text(match[0])}"
    return None


def read_statuses(log: ProcessLog) -> list[ProcessStatus]:
    """Read the states of all other processes, hanging ones first."""
    machine, now = beats.identify_machine(), time.time()
    statuses = [
        ProcessStatus(beat, state=_read_state(beat, machine), silence_s=max(now - beat.beat, 0.0))
        for beat in beats.read_heartbeats(log.folder / beats.HEARTBEATS_FOLDER).values()
        if beat.name != log.name
    ]
    return sorted(statuses, key=lambda status: not status.is_hanging)


def _belongs_to(status: ProcessStatus, processes: Iterable[str]) -> bool:
    name = status.heartbeat.name
    return any(name == process or name.startswith(f"{process} ") for process in processes)


def _describe_statuses(statuses: Sequence[ProcessStatus]) -> list[str]:
    parts = [str(status) for status in statuses[:MAX_DESCRIBED]]
    if len(statuses) > MAX_DESCRIBED:
        parts.append(f"the driver's log lists {len(statuses) - MAX_DESCRIBED} more")
    return parts


def _read_state(beat: beats.Heartbeat, machine: str) -> str:
    if beat.machine != machine:
        return FAR
    try:
        process = psutil.Process(beat.pid)
        status = process.status()
        if process.create_time() > beat.beat + 1.0:  # created after the last beat: another process with the same pid
            return GONE
    except psutil.NoSuchProcess:
        return GONE
    states = {psutil.STATUS_STOPPED: STOPPED, psutil.STATUS_TRACING_STOP: TRACED}
    return GONE if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else states.get(status, ALIVE)


def request_stacks(log: ProcessLog, phase_name: str, overdue: Sequence[ProcessStatus]) -> None:
    """Make processes write their stacks into their logs."""
    # A live process gets a signal, one of another machine a byte in its file of requests; py-spy reads a stopped one.
    stopped = [status.heartbeat for status in overdue if status.state in (STOPPED, TRACED)]
    signalled: dict[Path, int] = {}
    wait_s = 0.0
    for status in overdue:
        beat = status.heartbeat
        if status.state == ALIVE:
            _append(log, beat.name, f"{phase_name} is overdue; the stacks of the process's threads:")
            file = build_log_path(log.folder, beat.name)
            size = file.stat().st_size
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGUSR1)
                signalled[file] = size
        elif status.state == FAR:
            with beats.build_requests_path(log.folder / beats.HEARTBEATS_FOLDER, beat.name).open("ab") as requests:
                requests.write(b"!")
            wait_s = max(wait_s, REQUEST_BEATS * beats.read_beat_s())
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = pool.map(_read_stacks_from_outside, [beat.pid for beat in stopped[:PY_SPIES]])
        for beat, text in zip(stopped, texts, strict=False):
            _append(log, beat.name, f"{phase_name} is overdue and this process is stopped; {text}")
    started = time.monotonic()
    _wait_for_stacks(signalled)
    time.sleep(max(wait_s - (time.monotonic() - started), 0.0))


def _wait_for_stacks(sizes: dict[Path, int]) -> None:
    """Wait until every log has grown and stays, at most SIGNAL_WAIT_S."""
    # A busy machine may run a signalled process seconds later.
    deadline, previous, unchanged_since = time.monotonic() + SIGNAL_WAIT_S, dict(sizes), time.monotonic()
    while sizes and (now := time.monotonic()) < deadline:
        current = {file: file.stat().st_size for file in sizes}
        if current != previous:
            previous, unchanged_since = current, now
        elif all(current[file] > size for file, size in sizes.items()) and now - unchanged_since >= QUIET_S:
            return
        time.sleep(QUIET_S / 4)


def _read_stacks_from_outside(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "its stacks cannot be read: there is no py-spy"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        dump = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its stacks cannot be read: py-spy did not end within {PY_SPY_S:g} s"
    if dump.returncode:
        return f"its stacks cannot be read: py-spy says {dump.stderr.strip()}"
    return f"its stacks, as py-spy reads them:\n{dump.stdout.rstrip()}"


def _append(log: ProcessLog, name: str, text: str) -> None:
    with build_log_path(log.folder, name).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{log.name}] {text}\n")
