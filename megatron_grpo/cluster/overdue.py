"""Reports of overdue calls: the phase of each process for the error message, and the stacks of overdue processes.

faulthandler writes the stacks of running processes; py-spy, which comes with Ray, writes those of stopped ones. Neither
knows the phase of a process or reaches other machines, so heartbeat files do that (heartbeat.py); torch's flight
recorder covers only collectives.
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

from megatron_grpo.cluster.heartbeat import FOLDER, Heartbeat, beat_s, read_heartbeats, requests_file, this_machine
from megatron_grpo.cluster.process_log import ProcessLog, current_log, log_file
from megatron_grpo.config.errors import shown

SILENT_BEATS = 5.0
"""Age of the last heartbeat, in beats, from which a process of this machine counts as hanging."""
FAR_SILENT_S = 30.0
"""Age from which a process of another machine counts as hanging: clocks may differ, and files may arrive late."""

DESCRIBED = 4
"""Most processes in a message; the driver's log lists all."""

SIGNAL_WAIT_S = 5.0
"""Most seconds for processes of this machine to write their stacks before the failed run ends them."""
QUIET_S = 0.2
"""Seconds without a new line after which the stacks in a log are complete."""
REQUEST_BEATS = 2.5
"""Beats for processes of other machines, which look for requests at every heartbeat, to write their stacks."""

PY_SPY_S = 10.0
PY_SPIES = 8
"""Deadline of py-spy in seconds, and most stopped processes that it reads."""

LOG_END_BYTES = 2**18
"""Bytes at the end of a log in which its last error is looked for."""
_ERROR = re.compile(r"\b[A-Za-z_][\w.]*(Error|Exception|Interrupt): .*\S")
"""The line of a traceback that names the exception, perhaps after the prefix of a logger."""

STOPPED, TRACED, GONE, ALIVE, FAR = "stopped", "traced", "gone", "alive", "far"
"""States of a process according to the kernel of this machine; FAR: the process is on another machine."""

_VERDICTS = {
    STOPPED: "its process is stopped (SIGSTOP)",
    TRACED: "a debugger holds its process",
    GONE: "its process is gone",
    ALIVE: "its interpreter does not respond",
    FAR: "its process or its machine hangs",
}
"""Descriptions of a hanging process, by its state."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process's last heartbeat and its state."""

    heartbeat: Heartbeat
    state: str
    """One of STOPPED, TRACED, GONE, ALIVE and FAR."""
    silence_s: float
    """Seconds since its last beat."""

    @property
    def hangs(self) -> bool:
        """Whether the process itself is stuck, rather than waiting for another."""
        if self.state in (STOPPED, TRACED, GONE):
            return True
        return self.silence_s > (FAR_SILENT_S if self.state == FAR else SILENT_BEATS * beat_s())

    def __str__(self) -> str:
        beat = self.heartbeat
        text = f"{beat.name} (pid {beat.pid} on {beat.host}) {doing(beat)}"
        if self.hangs or self.silence_s > 2 * beat_s():
            text += f", last heartbeat {self.silence_s:.0f} s ago"
        return f"{text}: {_VERDICTS[self.state]}" if self.hangs else text


def doing(beat: Heartbeat) -> str:
    """Activity of a process at its last beat: "is in phase 'train', entered 21 s ago"."""
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


def report_overdue(what: str, processes: Sequence[str]) -> str:
    """Log the state of every process, make overdue processes log their stacks, and describe these.

    Args:
        what: the overdue phase, for the logs ("training step").
        processes: names of overdue processes; a name includes its children ("generation engine 0 core").

    Returns:
        Text for the end of a message; empty when the run writes no logs.
    """
    log = current_log()
    if log is None:
        return ""
    everybody = process_statuses(log)
    overdue = [one for one in everybody if _belongs(one.heartbeat.name, processes)]
    silent = [name for name in processes if not any(_belongs(one.heartbeat.name, [name]) for one in overdue)]
    table = "\n".join(f"  {one}" for one in everybody)
    logger.error("%s is overdue; where the processes are:\n%s", what, table)
    request_stacks(log, what, overdue)
    parts = _described(overdue)
    parts += [f"{name} has not begun: it has no log" for name in silent[:DESCRIBED]]
    return "".join(f"; {part}" for part in parts) + f"; stacks are in {log.folder}"


def report_hanging(processes: Sequence[str], overdue: str | None = None) -> str:
    """Describe the processes that are stopped, gone or silent, for the end of another process's error message.

    Given the name of an `overdue` phase, they also log their stacks. A name in `processes` includes its children.
    """
    log = current_log()
    if log is None:
        return ""
    hanging = [one for one in process_statuses(log) if one.hangs and _belongs(one.heartbeat.name, processes)]
    if hanging and overdue is not None:
        request_stacks(log, overdue, hanging)
    ends = (_last_error(log_file(log.folder, one.heartbeat.name)) for one in hanging if one.state == GONE)
    return "".join(f"; {part}" for part in (*_described(hanging), *filter(None, ends)))


def _last_error(file: Path) -> str | None:
    """The last error in the log of a process that is gone, with the name of the log; None: the log has none."""
    with file.open("rb") as opened:
        opened.seek(-min(LOG_END_BYTES, file.stat().st_size), os.SEEK_END)
        lines = opened.read().decode(errors="replace").splitlines()
    errors = (found[0] for line in reversed(lines) if (found := _ERROR.search(line)))
    last = next(errors, None)
    return None if last is None else f"{file} ends with {shown(last)}"


def process_statuses(log: ProcessLog) -> list[ProcessStatus]:
    """State of every process that has a heartbeat, except this one; hanging processes first."""
    machine, now = this_machine(), time.time()
    found = [
        ProcessStatus(beat, state=_state(beat, machine), silence_s=max(now - beat.beat, 0.0))
        for beat in read_heartbeats(log.folder / FOLDER).values()
        if beat.name != log.name
    ]
    return sorted(found, key=lambda one: not one.hangs)


def _belongs(name: str, processes: Iterable[str]) -> bool:
    return any(name == process or name.startswith(f"{process} ") for process in processes)


def _described(found: Sequence[ProcessStatus]) -> list[str]:
    """Descriptions of processes, at most as many as a message holds."""
    parts = [str(one) for one in found[:DESCRIBED]]
    if len(found) > DESCRIBED:
        parts.append(f"the driver's log lists {len(found) - DESCRIBED} more")
    return parts


def _state(beat: Heartbeat, machine: str) -> str:
    if beat.machine != machine:
        return FAR
    try:
        process = psutil.Process(beat.pid)
        status = process.status()
        if process.create_time() > beat.beat + 1.0:  # created after the last beat: another process with the same pid
            return GONE
    except psutil.NoSuchProcess:
        return GONE
    known = {psutil.STATUS_STOPPED: STOPPED, psutil.STATUS_TRACING_STOP: TRACED}
    return GONE if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else known.get(status, ALIVE)


def request_stacks(log: ProcessLog, what: str, overdue: Sequence[ProcessStatus]) -> None:
    """Make processes write their stacks into their logs, and wait for the stacks."""
    stopped = [one.heartbeat for one in overdue if one.state in (STOPPED, TRACED)]
    signalled: dict[Path, int] = {}
    wait_s = 0.0
    for one in overdue:
        beat = one.heartbeat
        if one.state == ALIVE:
            _append(log, beat.name, f"{what} is overdue; the stacks of the process's threads:")
            file = log_file(log.folder, beat.name)
            size = file.stat().st_size
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGUSR1)
                signalled[file] = size
        elif one.state == FAR:
            with requests_file(log.folder / FOLDER, beat.name).open("ab") as requests:
                requests.write(b"!")
            wait_s = max(wait_s, REQUEST_BEATS * beat_s())
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = pool.map(_stacks_from_outside, [beat.pid for beat in stopped[:PY_SPIES]])
        for beat, text in zip(stopped, texts, strict=False):
            _append(log, beat.name, f"{what} is overdue and this process is stopped; {text}")
    started = time.monotonic()
    _wait_for_stacks(signalled)
    time.sleep(max(wait_s - (time.monotonic() - started), 0.0))


def _wait_for_stacks(sizes: dict[Path, int]) -> None:
    """Wait until every log has grown and then grows no more, at most SIGNAL_WAIT_S.

    `sizes`: bytes of each log before its process was asked. A busy machine may run a signalled process seconds later.
    """
    deadline, latest, unchanged_since = time.monotonic() + SIGNAL_WAIT_S, dict(sizes), time.monotonic()
    while sizes and (now := time.monotonic()) < deadline:
        current = {file: file.stat().st_size for file in sizes}
        if current != latest:
            latest, unchanged_since = current, now
        elif all(current[file] > size for file, size in sizes.items()) and now - unchanged_since >= QUIET_S:
            return
        time.sleep(QUIET_S / 4)


def _stacks_from_outside(pid: int) -> str:
    """Read the stacks of a stopped process with py-spy; returns the stacks, or the reason why they cannot be read."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "its stacks cannot be read: there is no py-spy"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its stacks cannot be read: py-spy did not end within {PY_SPY_S:g} s"
    if done.returncode:
        return f"its stacks cannot be read: py-spy says {done.stderr.strip()}"
    return f"its stacks, as py-spy reads them:\n{done.stdout.rstrip()}"


def _append(log: ProcessLog, name: str, text: str) -> None:
    """Write a line into the log of another process."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with log_file(log.folder, name).open("a", encoding="utf-8") as file:
        file.write(f"{stamp} [{log.name}] {text}\n")
