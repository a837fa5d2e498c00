"""The file system that a program in the sandbox sees: the system's folders, read-only, and one folder of its own."""

from __future__ import annotations

import os

from megatron_grpo.environments.sandbox import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


FOLDER = "/program"
"""The program's own folder, its first working directory."""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
_FILES = 10_000
"""Largest number of files in the program's folder."""


def enter_root(readable: Sequence[str], folder_bytes: int, user: int, group: int) -> None:
    """Make this file system the root of this process, and enter the program's folder. Needs a new mount namespace.

    Args:
        readable: further folders that are shown, read-only, under their paths.
        folder_bytes: size of the program's folder, which is in memory.
        user: owner of that folder, as numbered in this namespace.
        group: the group that owns it.

    Raises:
        OSError: the kernel does not allow it.
    """
    os.umask(0o022)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)  # what follows stays in this namespace
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path in (*SYSTEM, *SYSTEM_FILES, *readable):
        _show(path)
    _make_devices()
    _make_proc()
    _write("/etc/passwd", f"program:x:{user}:{group}::{FOLDER}:/bin/sh\n")
    _write("/etc/group", f"program:x:{group}:\n")
    os.makedirs(FOLDER)
    owner = f"mode=700,uid={user},gid={group},size={folder_bytes},nr_inodes={_FILES}"
    kernel.unmount("/old")
    os.rmdir("/old")
    if not os.path.lexists("/tmp"):  # it is there when something below it is readable
        os.symlink(FOLDER, "/tmp")
    kernel.mount("tmpfs", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    kernel.mount("tmpfs", FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, owner)
    os.chdir(FOLDER)


def _show(path: str) -> None:
    """Mount a file or folder of the old root at its path, read-only; copies links, and skips missing paths."""
    source = f"/old{path}"
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        _write(path, "")
    kernel.mount(source, path, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(path)


def _make_devices() -> None:
    os.mkdir("/dev")
    for name in DEVICES:
        _write(f"/dev/{name}", "")
        kernel.mount(f"/old/dev/{name}", f"/dev/{name}", flags=kernel.MS_BIND)
    os.symlink(FOLDER, "/dev/shm")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")


def _make_proc() -> None:
    """Mount /proc of this namespace; an empty folder where the kernel refuses it (in some containers)."""
    os.mkdir("/proc")
    try:
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    except PermissionError:
        return


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


ENTRANCE = "/sandbox"
"""Folder in the sandbox with its modules, which the first process there imports."""

_MODULES = "megatron_grpo/environments/sandbox"
_PREPARE = (
    "import sys; sys.path.append(sys.argv.pop(1)); from megatron_grpo.environments.sandbox.entrance import inside; "
    "inside(int(sys.argv[1]), int(sys.argv[2]))"
)


def command(spec: dict[str, Any], python: str, spec_fd: int, ready_fd: int, user: int) -> list[str]:
    """The command that starts bubblewrap, which runs `entrance.inside` in the file system that it makes.

    Args:
        spec: description of the program, as `entrance.main` gets it.
        python: interpreter for `entrance.inside`, in a folder that the program may read.
        spec_fd: file descriptor with the description, at its beginning.
        ready_fd: file descriptor that is written to before the program starts.
        user: user and group of the program in its namespace.
    """
    return [
        spec["bubblewrap"],
        *("--die-with-parent", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--uid", str(user), "--gid", str(user)),
        # Takes a second user namespace; a filter of system calls does without.
        *(("--disable-userns",) if spec["level"] == "namespaces" else ()),
        *_shown(spec["readable"]),
        *("--ro-bind", os.path.dirname(os.path.abspath(__file__)), f"{ENTRANCE}/{_MODULES}"),
        *_devices(),
        *("--proc", "/proc"),
        *("--ro-bind-data", str(_text(f"program:x:{user}:{user}::{FOLDER}:/bin/sh\n")), "/etc/passwd"),
        *("--ro-bind-data", str(_text(f"program:x:{user}:\n")), "/etc/group"),
        *("--perms", "0700", "--size", str(spec["folder_bytes"]), "--tmpfs", FOLDER),
        *("--remount-ro", "/", "--chdir", FOLDER, "--"),
        *(python, "-I", "-S", "-c", _PREPARE, ENTRANCE, str(spec_fd), str(ready_fd)),
    ]


def _shown(readable: list[str]) -> list[str]:
    """The system's files, and further ones, read-only under their paths; links as links."""
    options: list[str] = []
    seen: list[str] = []
    for path in (*SYSTEM, *SYSTEM_FILES, *readable):
        if any(path == one or path.startswith(f"{one}/") for one in seen):
            continue
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            options += ["--ro-bind", path, path]
        seen.append(path)
    if not any(path.startswith("/tmp/") for path in readable):
        options += ["--symlink", FOLDER, "/tmp"]
    return options


def _devices() -> list[str]:
    options: list[str] = []
    for name in DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        options += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return [*options, "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", FOLDER, "/dev/shm"]


def _text(text: str) -> int:
    """A file descriptor with a text of one line, which child processes inherit."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    os.set_inheritable(reading, True)
    return reading
