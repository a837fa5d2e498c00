"""The filter of system calls: what reaches past namespaces and limits, or is only ever asked for to attack a kernel."""

from __future__ import annotations

import ctypes
import errno

from megatron_grpo.environments.sandbox.kernel import CLONE_NEWUSER

LIBRARY = "libseccomp.so.2"

_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_AF_UNIX = 1  # importing socket for it takes longer than all else here

_REFUSED = (
    # Memory that no limit of a process counts.
    *("memfd_create", "memfd_secret", "shmget", "shmat", "msgget", "semget", "mq_open"),
    # Other processes.
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise"),
    # Namespaces and mounts, through which a process gets rights in a kernel's rarely used parts.
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "fanotify_init", "name_to_handle_at", "open_by_handle_at"),
    # Large interfaces of the kernel that are seldom needed and often broken.
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "personality", "modify_ldt", "syslog", "vhangup", "acct", "quotactl"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "iopl", "ioperm", "sethostname", "setdomainname"),
)


class _Comparison(ctypes.Structure):
    """libseccomp's struct scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class Filter:
    """Loads libseccomp; `apply` filters the system calls of this process and of those that it starts.

    Raises:
        OSError: libseccomp is not installed.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._library.seccomp_init.restype = ctypes.c_void_p

    def apply(self) -> None:
        """Filter from here on, for good; needs `gain_no_rights`.

        Raises:
            OSError: the kernel does not filter.
        """
        context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(_ALLOW)))
        for name in _REFUSED:
            self._refuse(context, name)
        # Only sockets within the sandbox: network namespaces do not reach every family (vsock leads to the host).
        self._refuse(context, "socket", _Comparison(0, _NOT_EQUAL, _AF_UNIX, 0))
        self._refuse(context, "clone", _Comparison(0, _MASKED_EQUAL, CLONE_NEWUSER, CLONE_NEWUSER))
        # Its flags lie in memory, where no filter sees them; C libraries then take clone.
        self._refuse(context, "clone3", error=errno.ENOSYS)
        failed = self._library.seccomp_load(context)
        self._library.seccomp_release(context)
        if failed:
            raise OSError(-failed, "the kernel accepts no filter of system calls")

    def _refuse(
        self, context: ctypes.c_void_p, name: str, condition: _Comparison | None = None, error: int = errno.EPERM
    ) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # this architecture, or this release of the library, has no such call
        count = 0 if condition is None else 1
        conditions = (_Comparison * 1)(condition) if condition is not None else None
        action = ctypes.c_uint32(_ERROR | error)
        failed = self._library.seccomp_rule_add_array(context, action, number, ctypes.c_uint(count), conditions)
        if failed:
            raise OSError(-failed, f"no filter for the system call {name}")
