"""System calls that Python lacks, and functions on a program's processes.

Modules that `launcher.py` imports import little themselves, because a new process loads them for every program.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from ctypes import c_int, c_uint, c_uint64

# Flags of new namespaces of control groups, host names, IPC, processes and networks.
NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1 << 5, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2

_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442  # the same on all architectures
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_VM = 1
_CAPABILITY_VERSION = 0x20080522
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_SET_THP_DISABLE = 41

_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mount of {source} on {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all below read-only, without set-user-id files and devices."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    arguments = (_AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)))
    result = _LIBC.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), -1, target.encode(), *arguments)
    _check(result, f"making {target} read-only")


def pivot_root(new_root: str, old_root: str) -> None:
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_LIBC.syscall(ctypes.c_long(number), new_root.encode(), old_root.encode()), "pivot_root")


def unmount(target: str) -> None:
    _check(_LIBC.umount2(target.encode(), MNT_DETACH), f"unmount of {target}")


def die_with_parent(signal: int) -> None:
    """Request a signal when the thread that started this process ends."""
    _set_process_option(_PR_SET_PDEATHSIG, signal)  # a change of the user resets the request


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends."""
    _set_process_option(_PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid processes of the same user to inspect this process."""
    _set_process_option(_PR_SET_DUMPABLE, int(dumpable))  # a process must be dumpable to write its own user map


def forbid_new_rights() -> None:
    """Prevent executed programs from gaining rights, as by set-user-id files."""
    _set_process_option(_PR_SET_NO_NEW_PRIVS, 1)


def use_small_pages() -> None:
    """Restrict this process and its descendants to pages of the smallest size."""
    _set_process_option(_PR_SET_THP_DISABLE, 1)


def is_memory_shared(pid: int, other_pid: int) -> bool:
    """True if two processes have the same address space, as with vfork (kcmp(2))."""
    # False on architectures where the number of the call is not known.
    arguments = map(ctypes.c_long, (_SYS_KCMP.get(os.uname().machine, -1), pid, other_pid, _KCMP_VM, 0, 0))
    return int(_LIBC.syscall(*arguments)) == 0


def drop_capabilities() -> None:
    """Give up all rights of root, also those that execution would restore."""
    # These rights would also lift the kernel's bounds on sockets in messages and on pipes.
    for number in range(64 if os.geteuid() == 0 else 0):
        if _LIBC.prctl(_PR_CAPBSET_READ, ctypes.c_ulong(number)) == 1:
            _set_process_option(_PR_CAPBSET_DROP, number)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _check(_LIBC.capset(header, none), "capset")


def _set_process_option(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


LIBRARY = "libseccomp.so.2"

_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_INT = 0xFFFFFFFF  # the kernel ignores the upper half of an argument of type int, so a comparison must ignore it too
_F_SETPIPE_SZ = 1031
_MAP_SHARED_ANONYMOUS, _MAP_POPULATE = 0x21, 0x8000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 7, 8, 32, 33
_AF_UNIX = 1  # importing socket for it would take longer than all other imports here

_REFUSED = (
    # Memory that the limits of a process do not count.
    *("memfd_create", "memfd_secret", "shmget", "shmat", "msgget", "semget", "mq_open"),
    *("vmsplice", "inotify_init", "inotify_init1"),
    # Access to other processes.
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise"),
    # Namespaces and mounts, through which a process gains access to rarely tested parts of the kernel.
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "fanotify_init", "name_to_handle_at", "open_by_handle_at"),
    # Large kernel interfaces that are seldom needed and often vulnerable.
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "personality", "modify_ldt", "syslog", "vhangup", "acct", "quotactl"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "iopl", "ioperm", "sethostname", "setdomainname"),
)


class _Comparison(ctypes.Structure):
    """libseccomp's struct scmp_arg_cmp."""

    _fields_ = (("argument", c_uint), ("operator", c_int), ("first", c_uint64), ("second", c_uint64))


# System calls that the filter refuses: name, error, and conditions on the arguments.
_RULES: tuple[tuple[str, int, tuple[_Comparison, ...]], ...] = (
    *((name, errno.EPERM, ()) for name in _REFUSED),
    # Only Unix sockets: network namespaces do not cover every family (vsock reaches the host).
    ("socket", errno.EPERM, (_Comparison(0, _NOT_EQUAL, _AF_UNIX, 0),)),
    # No limit of a process counts the data in its sockets, whose buffers must keep their usual, small size.
    *(
        ("setsockopt", errno.EPERM, (_Comparison(2, _MASKED_EQUAL, _INT, option),))
        for option in (_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE)
    ),
    ("fcntl", errno.EPERM, (_Comparison(1, _MASKED_EQUAL, _INT, _F_SETPIPE_SZ),)),
    ("clone", errno.EPERM, (_Comparison(0, _MASKED_EQUAL, CLONE_NEWUSER, CLONE_NEWUSER),)),
    # A filter cannot see the flags of clone3, which are in memory; on ENOSYS, C libraries fall back to clone.
    ("clone3", errno.ENOSYS, ()),
)

# System calls that the filter also refuses where no memory cgroup counts the program's memory.
_RULES_WITHOUT_CGROUP = (
    # Pages of a shared anonymous mapping stay when a process unmaps most of them, and then count for no process.
    ("mmap", errno.EPERM, (_Comparison(3, _MASKED_EQUAL, _MAP_SHARED_ANONYMOUS, _MAP_SHARED_ANONYMOUS),)),
    # Memory that a process takes within one system call, during which it does not stop, and large pages.
    ("mmap", errno.EPERM, (_Comparison(3, _MASKED_EQUAL, _MAP_POPULATE, _MAP_POPULATE),)),
    *(
        ("madvise", errno.EINVAL, (_Comparison(2, _MASKED_EQUAL, _INT, advice),))
        for advice in (_MADV_POPULATE_READ, _MADV_POPULATE_WRITE)
    ),
    ("prctl", errno.EPERM, (_Comparison(0, _MASKED_EQUAL, _INT, _PR_SET_THP_DISABLE),)),
)


def has_filter() -> bool:
    """True if libseccomp is installed."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def filter_system_calls(*, has_cgroup: bool) -> None:
    """Filter the system calls of this process and its descendants.

    Nothing removes the filter. Call `forbid_new_rights` first. `has_cgroup`: the program is in a memory cgroup.
    OSError: libseccomp is not installed, or the kernel does not accept the filter.
    """
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    for name, error, conditions in _RULES if has_cgroup else (*_RULES, *_RULES_WITHOUT_CGROUP):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue  # this architecture, or this release of the library, has no such call
        count = len(conditions)
        arguments = (ctypes.c_uint32(_ERROR | error), number, ctypes.c_uint(count), (_Comparison * count)(*conditions))
        failed = library.seccomp_rule_add_array(context, *arguments)
        if failed:
            raise OSError(-failed, f"no filter for the system call {name}")
    failed = library.seccomp_load(context)
    library.seccomp_release(context)
    if failed:
        raise OSError(-failed, "the kernel accepts no filter of system calls")


def list_descendants(pid: int) -> list[int]:
    """List the descendants of a process, nearest first, with zombies."""
    pids = [pid]
    for parent in pids:  # the list grows meanwhile
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:  # the process has ended
            continue
        for thread in threads:
            pids += map(int, read(f"/proc/{parent}/task/{thread}/children").split())
    return pids[1:]


def kill(pids: Iterable[int], signal_number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def read(path: str) -> bytes:
    """Read a file of /proc; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
