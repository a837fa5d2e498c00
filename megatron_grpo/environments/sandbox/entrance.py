"""What runs between the one who asks for a program and the program: a process that takes rights away, then waits.

It is started in bare Python, once a program, and kills all that is left of the program before it ends itself.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sys

from megatron_grpo.environments.sandbox import kernel
from megatron_grpo.environments.sandbox.kernel import Filter
from megatron_grpo.environments.sandbox.processes import descendants
from megatron_grpo.environments.sandbox.root import FOLDER, enter_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

NOBODY = 65534
"""User and group of programs that root runs."""
PROGRAM = 1000
"""User and group that a program of an ordinary user sees itself as."""
NOT_FOUND = 127
"""Exit code of a program that cannot be run, as in a shell."""

_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


def main(spec_fd: int, status_fd: int) -> None:
    """Run the program that is described behind one descriptor, and write what became of it to the other.

    The description is a dict, marshalled: that needs no import. The status is a line, "exited" and the exit code, as a
    shell has it (128 and the signal's number when one ended it), or "refused" and why the program was not started; the
    first line counts.
    """
    kernel.die_with_parent(signal.SIGKILL)
    os.set_inheritable(status_fd, False)
    with open(spec_fd, "rb") as file:
        spec: dict[str, Any] = marshal.load(file)
    try:
        if spec["level"] == "limits":
            exit_code = _limited(spec)
        elif spec["bubblewrap"] is not None:
            exit_code = _by_bubblewrap(spec)
        else:
            exit_code = _apart(spec, status_fd)
    except OSError as error:
        status = f"refused {error}"
    else:
        status = f"exited {exit_code}"
    os.write(status_fd, f"{status}\n".encode())


def _limited(spec: dict[str, Any]) -> int:
    """The program as a child of this process, which gets its orphans."""
    kernel.adopt_orphans()
    os.chdir(spec["folder"])
    child = _fork()
    if child == 0:
        kernel.die_with_parent(signal.SIGKILL)  # nothing else keeps it from killing this process, and living on
        _become(spec)
    return _end_of_all(child)


def _by_bubblewrap(spec: dict[str, Any]) -> int:
    """The program as a child of bubblewrap's, which makes the namespaces."""
    from megatron_grpo.environments.sandbox.root import command

    kernel.adopt_orphans()
    ready_read, ready_write = os.pipe()
    child = _fork()
    if child == 0:
        spec_fd = os.memfd_create("spec", 0)
        os.write(spec_fd, marshal.dumps(spec))
        os.lseek(spec_fd, 0, os.SEEK_SET)
        os.set_inheritable(ready_write, True)
        argv = command(spec, sys.executable, spec_fd, ready_write, PROGRAM)
        try:
            os.execv(argv[0], argv)
        finally:
            os._exit(NOT_FOUND)
    os.close(ready_write)
    exit_code = _end_of_all(child)
    if exit_code < 128 and not os.read(ready_read, 1):
        raise OSError("bubblewrap did not start it")
    return exit_code


def inside(spec_fd: int, ready_fd: int) -> None:
    """The first process of ours in the namespaces that bubblewrap has made: becomes the program.

    Args:
        spec_fd: descriptor with the description, marshalled.
        ready_fd: descriptor that is written to when nothing can keep the program from being run any more.
    """
    with open(spec_fd, "rb") as file:
        spec: dict[str, Any] = marshal.load(file)
    for name, text in spec["files"].items():
        _put(name, text)
    os.write(ready_fd, b"r")
    os.close(ready_fd)
    _become(spec)


def _end_of_all(child: int) -> int:
    """Wait for a child and end all that is left of its own children; its exit code, as a shell has it."""
    _end_on_request(child)
    exit_code = _wait(child)
    while living := descendants(os.getpid()):
        for pid in living:
            _kill(pid)
        while _reaped():
            pass
    return exit_code


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reaped() -> bool:
    """Take leave of a child that has ended; whether there was one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _apart(spec: dict[str, Any], status_fd: int) -> int:
    """The program in namespaces of its own; its first process is ours, and with that all others end."""
    mapped = _unshare()
    child = _fork()
    if child == 0:
        try:
            _first_process(spec, mapped)
        except OSError as error:
            os.write(status_fd, f"refused {error}\n".encode())
        os._exit(NOT_FOUND)
    _end_on_request(child)
    return _wait(child)


def _unshare() -> bool:
    """New namespaces; whether a user namespace is among them, which all but root need."""
    try:
        kernel.unshare(_NAMESPACES)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        kernel.unshare(_NAMESPACES | kernel.CLONE_NEWUSER)
        _map_user(PROGRAM, user, group)
        return True
    return False


def _map_user(inside: int, user: int, group: int) -> None:
    """In a new user namespace, call this process's user and group by a number."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def _first_process(spec: dict[str, Any], mapped: bool) -> NoReturn:
    """Process 1 of the namespaces: makes the file system, starts the program and waits for it."""
    kernel.die_with_parent(signal.SIGKILL)
    user = PROGRAM if mapped else NOBODY
    enter_root(spec["readable"], spec["folder_bytes"], user, user)
    if not mapped:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.set_dumpable(True)  # changing the user took it away, and with it the right to write the map
        kernel.unshare(kernel.CLONE_NEWUSER)  # in a namespace of its own, processes of other programs do not count
        _map_user(NOBODY, NOBODY, NOBODY)
        kernel.die_with_parent(signal.SIGKILL)
    _write_if_allowed("/proc/sys/user/max_user_namespaces", "0")
    kernel.set_dumpable(False)
    for name, text in spec["files"].items():
        _put(name, text)
    child = _fork()
    if child == 0:
        _become(spec)
    os.closerange(0, 256)  # output ends when the program's processes have closed it, not when this one has
    os._exit(_wait(child))


def _put(name: str, text: str) -> None:
    path = os.path.join(FOLDER, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _become(spec: dict[str, Any]) -> NoReturn:
    """Limit this process and turn it into the program."""
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        _limit(spec)
        kernel.set_dumpable(True)
        kernel.gain_no_rights()
        if spec["level"] == "filtered":
            Filter().apply()
        os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])
    except (OSError, ValueError) as error:
        print(f"cannot run {spec['argv'][0]}: {error}", file=sys.stderr, flush=True)
    os._exit(NOT_FOUND)


def _limit(spec: dict[str, Any]) -> None:
    _write_if_allowed("/proc/self/oom_score_adj", "1000")  # if the machine runs short of memory, this goes first
    seconds, memory = spec["cpu_time_s"], spec["memory_bytes"]
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_DATA: (memory, memory),
        resource.RLIMIT_FSIZE: (spec["folder_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_NPROC: (spec["processes"] + 1,) * 2,  # and process 1
    }
    if spec["level"] == "limits":
        del limits[resource.RLIMIT_NPROC]  # it would count all that this user runs
    for limit, values in limits.items():
        resource.setrlimit(limit, values)


def _write_if_allowed(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return


def _fork() -> int:
    sys.stdout.flush()
    return os.fork()


def _end_on_request(child: int) -> None:
    """Kill the program when this process is asked to end; it may have ended by then."""
    signal.signal(signal.SIGTERM, lambda *_: _kill(child))


def _wait(child: int) -> int:
    """Reap whoever ends, until the child does; its exit code, as a shell has it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
