"""Ends the processes that an environment starts, however the environment ends.

A process that forks away and has a session of its own outlives the end of its parent and a signal to its group. This
file is also the program that ends it. Run by bare Python it needs only the standard library:

    run PID BYTES COMMAND...   run a command; end all its descendants with the command, with process PID, on SIGTERM, or
                               once a line of its output has more than BYTES bytes, unless they are 0
    watch PID MARK             once process PID has ended, end the processes that have its mark
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "MEGATRON_GRPO_PROCESS_MARK"
GRACE_S = 1.0  # seconds that a command has to end after SIGTERM; the SDK of MCP waits two
GIVE_UP_S = 10.0  # a process of another user cannot be ended
NOT_FOUND = 127  # exit code of a command that cannot be run, as in a shell

_PR_SET_CHILD_SUBREAPER = 36
_marks: list[int] = []  # open files, which forked processes inherit


def wrap_command(command: Sequence[str], line_bytes: int = 0) -> list[str]:
    """Make the command that runs `command` under a guard.

    It has the streams and the exit code of `command`. All processes that `command` starts end with it, with the calling
    process, on SIGTERM or SIGKILL, and once a line of its output has more than `line_bytes` bytes; 0: any length.
    """
    return _make_program("run", str(line_bytes), *command)


def start_guard() -> None:
    """End the processes that this process starts once it has ended.

    They are found by a variable of the environment, or, if they were forked without another program, by an open file.
    A process that has removed its variable or file stays: for programs like that there is `wrap_command`.
    """
    mark = secrets.token_hex(16)
    os.environ[MARK_VARIABLE] = mark
    _marks.append(os.memfd_create(mark))
    # Ray kills the children of a process before the process itself: the guard is none of them, because it forks away.
    subprocess.run(_make_program("watch", mark), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


def _make_program(mode: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", __file__, mode, str(os.getpid()), *arguments]


def run_guarded(process: int, line_bytes: int, command: Sequence[str]) -> int:
    """Run a command and wait for its end; returns its exit code."""
    # Two processes: the caller may kill the first, its child, with SIGKILL; the second then ends the command.
    watched = [os.pidfd_open(process), os.pidfd_open(os.getpid())]
    output = os.pipe() if line_bytes else None
    guard = os.fork()
    if guard == 0:
        if output is not None:
            os.dup2(output[1], 1)
            os.closerange(min(output), max(output) + 1)
        os._exit(_run_command(command, watched))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.kill(guard, signal.SIGTERM))
    if output is not None:
        _release_streams(0)
        os.close(output[1])
        if not _copy_lines(output[0], line_bytes):
            print(f"a line has more than {line_bytes} bytes: {command[0]} is ended", file=sys.stderr, flush=True)
            os.kill(guard, signal.SIGTERM)
        os.close(output[0])
    _release_streams()
    return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])


def _copy_lines(source: int, line_bytes: int) -> bool:
    """Copy to standard output until the end; False: a line is too long."""
    length = 0  # of the line so far
    with suppress(BrokenPipeError):  # nobody reads any more
        while chunk := os.read(source, 1 << 16):
            *ends, rest = chunk.split(b"\n")
            if length + len(ends[0] if ends else rest) > line_bytes:
                return False
            length = len(rest) + (0 if ends else length)
            view = memoryview(chunk)
            while view:
                view = view[os.write(1, view) :]
    return True


def _run_command(command: Sequence[str], watched: Sequence[int]) -> int:
    """Run a command until it, or a watched process, ends."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    wake_up = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_up[1])
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # by Python
        child = os.posix_spawnp(command[0], [*command], os.environ, setsid=True, setsigdef=ignored)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND
    _release_streams()
    poll = select.poll()
    for fd in (*watched, wake_up[0]):
        poll.register(fd, select.POLLIN)
    code: int | None = None
    deadline = float("inf")
    while code is None and time.monotonic() < deadline:
        ready = {fd for fd, _ in poll.poll(None if deadline == float("inf") else 1000 * GRACE_S / 10)}
        if ready.intersection(watched):
            break
        if wake_up[0] in ready and signal.SIGTERM in os.read(wake_up[0], 4096):
            deadline = min(deadline, time.monotonic() + GRACE_S)
            os.kill(child, signal.SIGTERM)
        code = _collect_exit_code(child)
    _end_children()
    return code if code is not None else 128 + signal.SIGKILL


def _release_streams(*streams: int) -> None:
    """Leave streams, by default standard input and output, to the command alone."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams or (0, 1):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _collect_exit_code(child: int) -> int | None:
    """Reap ended children; returns the exit code of `child`, as in a shell."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_children() -> None:
    """Kill all descendants: the orphans of a killed child become children."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        for pid in _list_processes():
            if _read_parent(pid) == os.getpid():
                _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.0005)


def watch_process(process: int, mark: str) -> None:
    """Wait for the end of a process, then kill what has its mark."""
    watched = os.pidfd_open(process)
    if os.fork():
        return
    os.setsid()
    select.select([watched], [], [])
    deadline = time.monotonic() + GIVE_UP_S
    # Processes without the mark are read once, and again at the end, because their numbers may be given anew: a process
    # that forks and ends, again and again, is only found within a millisecond.
    strangers = {os.getpid()}
    while time.monotonic() < deadline:
        is_whole, has_found = len(strangers) == 1, False
        for pid in _list_processes():
            if pid not in strangers and _has_mark(pid, mark.encode()):
                _kill(pid)
                has_found = True
            else:
                strangers.add(pid)
        if not has_found:
            if is_whole:
                return
            strangers = {os.getpid()}
        time.sleep(0.0002)


def _list_processes() -> list[int]:
    """List processes, the newest first."""
    # Those that fork and end, again and again, are there for less than a millisecond.
    return sorted((int(name) for name in os.listdir("/proc") if name.isdecimal()), reverse=True)


def _read_parent(pid: int) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return None


def _has_mark(pid: int, mark: bytes) -> bool:
    """Whether a process has inherited the mark; a zombie has nothing."""
    with suppress(OSError):  # it has ended, or belongs to another user
        if mark in Path(f"/proc/{pid}/environ").read_bytes():
            return True
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if mark in os.fsencode(os.readlink(f"/proc/{pid}/fd/{name}")):
                    return True
    return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run or watch, as the arguments say; returns the exit code."""
    mode, process, *rest = arguments
    try:
        if mode == "run":
            line_bytes, *command = rest
            return run_guarded(int(process), int(line_bytes), command)
        watch_process(int(process), *rest)
    except ProcessLookupError:  # the caller has already ended
        return NOT_FOUND
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
