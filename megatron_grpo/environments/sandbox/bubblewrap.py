"""The sandbox by way of bubblewrap, where it may have namespaces and this user may not.

Some distributions let only named programs have user namespaces, bubblewrap among them. What it makes is the same as
`root.py`, but for one thing: the number of files in the program's folder has no limit. One that is installed setuid
refuses, since it limits not even their size.
"""

from __future__ import annotations

import os

from megatron_grpo.environments.sandbox.root import DEVICES, FOLDER, SYSTEM, SYSTEM_FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENTRANCE = "/sandbox"
"""Where the modules of the sandbox are seen, which the first process within it imports."""

_MODULES = "megatron_grpo/environments/sandbox"
_PREPARE = (
    "import sys; sys.path.append(sys.argv.pop(1)); from megatron_grpo.environments.sandbox.entrance import inside; "
    "inside(int(sys.argv[1]), int(sys.argv[2]))"
)


def command(spec: dict[str, Any], python: str, spec_fd: int, ready_fd: int, user: int) -> list[str]:
    """What is run in place of the program: bubblewrap, which runs `entrance.inside` in the file system that it makes.

    Args:
        spec: description of the program, as `entrance.main` gets it.
        python: interpreter for what is run within, which has to be among what the program may read.
        spec_fd: descriptor with the description, at its beginning.
        ready_fd: descriptor that is written to before the program begins.
        user: user and group that the program sees itself as.
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
    """A descriptor from which a text of one line can be read, which the programs that are run inherit."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    os.set_inheritable(reading, True)
    return reading
