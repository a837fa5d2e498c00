"""Makes a program's file system: the system, read-only, and one folder.

Bubblewrap cannot limit the number of files, and neither bubblewrap nor nsjail can run a program of root as another user
in another user namespace if the interpreter is in root's home, where uv and pyenv put it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from megatron_grpo.environments.sandbox import kernel

FOLDER = "/program"  # the program's folder, its first working directory

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "full", "random", "urandom")
LINKS = {  # symbolic links with their targets
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/fd": "/proc/self/fd",
    "/dev/shm": FOLDER,
}
_MAX_FILES = 10_000  # in the program's folder


def enter_root(readable: Sequence[str], folder_bytes: int, user: int, *, with_zero: bool) -> None:
    """Make the program's file system this process's root; enter the folder.

    This process must be in a new mount namespace. The program sees the folders in `readable` under the same paths,
    read-only. Its own folder is in memory and belongs to `user` and the group of the same number. `with_zero` makes
    /dev/zero, a shared mapping of which is memory that only a memory cgroup counts. OSError names a mount that the
    kernel does not allow.
    """
    mounts, links = _list_paths(readable)
    os.umask(0o022)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)  # later mounts stay in this namespace
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path in mounts:
        source = f"/old{path}"
        if not os.path.lexists(source):  # below a link to an absolute path, which does not resolve here
            continue
        if os.path.isdir(source):
            os.makedirs(path, exist_ok=True)
        else:
            write(path, "")
        kernel.mount(source, path, flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.make_read_only(path)
    for name in (*DEVICES, "zero") if with_zero else DEVICES:
        write(f"/dev/{name}", "")
        kernel.mount(f"/old/dev/{name}", f"/dev/{name}", flags=kernel.MS_BIND)
    os.mkdir("/proc")
    with suppress(PermissionError):  # as in some containers, where /proc stays an empty folder
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    write("/etc/passwd", f"program:x:{user}:{user}::{FOLDER}:/bin/sh\n")
    write("/etc/group", f"program:x:{user}:\n")
    os.makedirs(FOLDER)
    owner = f"mode=700,uid={user},gid={user},size={folder_bytes},nr_inodes={_MAX_FILES}"
    kernel.unmount("/old")
    os.rmdir("/old")
    for path, target in links.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    kernel.mount("tmpfs", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    kernel.mount("tmpfs", FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, owner)
    os.chdir(FOLDER)


def _list_paths(readable: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    mounts: list[str] = []
    links = dict(LINKS)
    for path in (*SYSTEM, *SYSTEM_FILES, *readable):
        is_inside = any(path == parent or path.startswith(f"{parent}/") for parent in (*mounts, *links))
        if is_inside or not os.path.lexists(path):
            continue
        if os.path.islink(path):
            links[path] = os.readlink(path)
        else:
            mounts.append(path)
    if not any(f"{path}/".startswith("/tmp/") for path in mounts):
        links["/tmp"] = FOLDER
    return mounts, links


def write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
