"""Starts one program in the sandbox and waits for its end.

It runs in bare Python, drops its rights, and kills all processes of the program before it ends.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from megatron_grpo.environments.sandbox import kernel
from megatron_grpo.environments.sandbox.memory_watch import MemoryWatch
from megatron_grpo.environments.sandbox.root import FOLDER, enter_root, write

NOBODY_ID = 65534  # user and group id of programs that root runs
PROGRAM_ID = 1000  # user and group id of a program of an ordinary user, as the program sees it
# Limit of open files of a process without a memory cgroup. As many sockets again may be in undelivered messages;
# `memory_watch` does not count these, because no process has them open.
_FILES_WITHOUT_CGROUP = 64
# Modules whose `serve` runs tests and the program that they test.
_ROLES = tuple(f"megatron_grpo.environments.sandbox.{name}" for name in ("test_process", "program_process"))
NOT_FOUND = 127  # exit code of a program that cannot be run, as in a shell


def main(spec_fd: int, status_fd: int, partner_fd: int = -1) -> None:
    """Run the described program and report its status.

    A second program, which `partner_fd` describes, runs in another sandbox, with a pipe in each direction to the first,
    and ends with it. Both are then functions of this package, whose modules `role` names, instead of programs to
    execute.

    The description is a dict in the marshal format, which needs no import. The status is a line: "exited", or "memory"
    if the program was killed for its memory, and the exit code as in a shell (128 plus the signal's number if a signal
    ended it); or "refused" and the reason why the program was not started. Only the first line counts.
    """
    kernel.die_with_parent(signal.SIGKILL)
    os.set_inheritable(status_fd, False)
    if partner_fd < 0:
        _run_and_report(_read_spec(spec_fd), status_fd)
        return
    kernel.adopt_orphans()
    for role in _ROLES:
        import_module(role)  # modules of this package cannot be read inside the sandbox
    to_partner, from_partner = os.pipe(), os.pipe()
    partner = os.fork()
    if partner == 0:
        kernel.die_with_parent(signal.SIGKILL)
        # The partner never has the description of the first program, nor the first program that of its partner.
        for fd in (spec_fd, to_partner[1], from_partner[0]):
            os.close(fd)
        spec = {**_read_spec(partner_fd), "channel": (to_partner[0], from_partner[1])}
        _run_and_report(spec, status_fd, is_partner=True)
        os._exit(0)
    for fd in (partner_fd, to_partner[0], from_partner[1]):
        os.close(fd)
    _run_and_report({**_read_spec(spec_fd), "channel": (from_partner[0], to_partner[1])}, status_fd)
    kernel.kill([partner], signal.SIGKILL)
    _end_descendants()
    # Where /proc is that of a namespace, process 1 of the namespace is adopted here when it dies with its parent.
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _read_spec(fd: int) -> dict[str, Any]:
    with open(fd, "rb") as file:
        spec: dict[str, Any] = marshal.load(file)
    return spec


def _run_and_report(spec: dict[str, Any], status_fd: int, is_partner: bool = False) -> None:
    """Run a program and write its status, or a partner's refusal."""
    # Without a memory cgroup the first program's process watches the memory of both programs.
    needs_watch = not (is_partner or _has_cgroup(spec))
    watch = MemoryWatch(spec["memory_bytes"], spec["processes"]) if needs_watch else None
    is_limited = spec["level"] == "limits"
    try:
        exit_code = _run_limited(spec, watch) if is_limited else _run_in_namespaces(spec, status_fd, watch)
    except OSError as error:
        os.write(status_fd, f"refused {error}\n".encode())
    else:
        if not is_partner:
            ending = "memory" if watch is not None and watch.has_exceeded_limit else "exited"
            os.write(status_fd, f"{ending} {exit_code}\n".encode())


def _run_limited(spec: dict[str, Any], watch: MemoryWatch | None) -> int:
    kernel.adopt_orphans()  # so that all descendants can be listed and killed
    os.chdir(spec["folder"])
    child = os.fork()
    if child == 0:
        kernel.die_with_parent(signal.SIGKILL)  # otherwise the program could kill this process and continue
        _join_cgroup(spec)
        _execute(spec)
    _kill_on_request(child)
    exit_code = _wait(child, watch)
    _end_descendants()
    return exit_code


def _end_descendants() -> None:
    while living := kernel.list_descendants(os.getpid()):
        kernel.kill(living, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run_in_namespaces(spec: dict[str, Any], status_fd: int, watch: MemoryWatch | None) -> int:
    """Run the program in new namespaces."""
    has_user_map = False
    user, group = os.getuid(), os.getgid()
    try:
        kernel.unshare(kernel.NAMESPACES)
    except PermissionError:  # every user except root needs a user namespace
        kernel.unshare(kernel.NAMESPACES | kernel.CLONE_NEWUSER)
        _map_user(PROGRAM_ID, user, group)
        has_user_map = True
    child = os.fork()
    if child == 0:
        try:
            _run_first_process(spec, has_user_map)
        except OSError as error:
            os.write(status_fd, f"refused {error}\n".encode())
        os._exit(NOT_FOUND)
    _kill_on_request(child)
    return _wait(child, watch)


def _map_user(inside: int, user: int, group: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        write(f"/proc/self/{name}", text)


def _run_first_process(spec: dict[str, Any], has_user_map: bool) -> NoReturn:
    """Run process 1: make the file system, start the program, wait."""
    kernel.die_with_parent(signal.SIGKILL)
    _join_cgroup(spec)
    kernel.unshare(kernel.CLONE_NEWNS)  # here, because the launcher reads the machine's own /proc
    user = PROGRAM_ID if has_user_map else NOBODY_ID
    enter_root(spec["readable"], spec["folder_bytes"], user, with_zero=_has_cgroup(spec))
    if not has_user_map:
        os.setgroups([])
        os.setresgid(NOBODY_ID, NOBODY_ID, NOBODY_ID)
        os.setresuid(NOBODY_ID, NOBODY_ID, NOBODY_ID)
        kernel.set_dumpable(True)  # lost by changing the user; needed to write the map
        kernel.unshare(kernel.CLONE_NEWUSER)  # so that RLIMIT_NPROC counts only this program
        _map_user(NOBODY_ID, NOBODY_ID, NOBODY_ID)
        kernel.die_with_parent(signal.SIGKILL)
    with suppress(OSError):  # /proc may be empty or read-only
        write("/proc/sys/user/max_user_namespaces", "0")
    kernel.set_dumpable(False)
    for name, text in spec["files"].items():
        write(os.path.join(FOLDER, name), text)
    child = os.fork()
    if child == 0:
        _execute(spec)
    os.closerange(0, 256)  # so that output ends when the program closes it
    os._exit(_wait(child))


def _execute(spec: dict[str, Any]) -> NoReturn:
    """Apply the limits to this process and execute the program."""
    # The filter is last: it refuses calls that the steps before it make.
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        _set_limits(spec)
        kernel.drop_capabilities()
        kernel.set_dumpable(True)
        kernel.forbid_new_rights()
        if not _has_cgroup(spec):
            kernel.use_small_pages()
        if spec["filter"]:
            kernel.filter_system_calls(has_cgroup=_has_cgroup(spec))
        if spec["role"] is not None:
            import_module(spec["role"]).serve(spec)
        os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])
    except (OSError, ValueError) as error:
        print(f"cannot run {spec['role'] or spec['argv'][0]}: {error}", file=sys.stderr, flush=True)
    os._exit(NOT_FOUND)


def _has_cgroup(spec: dict[str, Any]) -> bool:
    return spec["join_fd"] is not None


def _join_cgroup(spec: dict[str, Any]) -> None:
    if _has_cgroup(spec):
        os.write(spec["join_fd"], b"0")
        os.close(spec["join_fd"])


def _set_limits(spec: dict[str, Any]) -> None:
    with suppress(OSError):  # the kernel may not allow it
        write("/proc/self/oom_score_adj", "1000")  # the program is killed first when memory runs out
    seconds, memory = spec["cpu_time_s"], spec["memory_bytes"]
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_DATA: (memory, memory),
        resource.RLIMIT_FSIZE: (spec["folder_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (256, 256) if _has_cgroup(spec) else (_FILES_WITHOUT_CGROUP,) * 2,
        resource.RLIMIT_SIGPENDING: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    if spec["level"] != "limits":  # at that level it would count all processes of the user
        limits[resource.RLIMIT_NPROC] = (spec["processes"] + 1,) * 2  # the program and process 1
    for limit, values in limits.items():
        resource.setrlimit(limit, values)


def _kill_on_request(child: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: kernel.kill([child], signal.SIGKILL))


def _wait(child: int, watch: MemoryWatch | None = None) -> int:
    """Reap children until `child` ends; returns its exit code."""
    if watch is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        pid, status = os.waitpid(-1, 0 if watch is None else os.WNOHANG)
        if pid == 0 and watch is not None:
            watch.step()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
