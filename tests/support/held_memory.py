"""Programs that hold memory of one kind each, and the most memory that a function and all its processes ever held."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_grpo.environments.sandbox.sandbox import MemoryCgroup, find_cgroup_parent
from tests.support.forked import in_fork

_WHATEVER = 2**36


def peak_of(function: Callable[[], Any]) -> tuple[Any, int | None]:
    """What a function returns in a forked process, and the most bytes that its cgroup held; None without cgroups."""
    parent = find_cgroup_parent()
    if parent is None:
        return function(), None
    group = MemoryCgroup(parent, _WHATEVER)
    try:
        result = in_fork(function, lambda: _join(group))
        folder = Path(os.readlink(f"/proc/self/fd/{group.join_fd}")).parent
        found = [path for path in (folder / "memory.peak", folder / "memory.max_usage_in_bytes") if path.exists()]
        return result, int(found[0].read_text())
    finally:
        group.close()


def _join(group: MemoryCgroup) -> None:
    os.write(group.join_fd, b"0")


_MAPPED = """
import mmap, os, time
{opened}
for at in range(0, len(held), 1 << 20):
    held[at : at + (1 << 20)] = bytes([1]) * (1 << 20)
    {hide}
time.sleep(60)
"""
_HIDE = "held.madvise(mmap.MADV_DONTNEED)"
_ANONYMOUS = "held = mmap.mmap(-1, 1 << 30)"
_ZERO = "held = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 30)"
_FILE = """
import os, time
held = open({folder!r} + '/held-%d' % os.getpid(), 'wb', buffering=0)
os.unlink(held.name)
for _ in range(1024):
    held.write(bytes([1]) * (1 << 20))
time.sleep(60)
"""
_SOCKETS = """
import os, socket, time
PASSED, PROCESSES = {passed}, {processes}
for _ in range(PROCESSES - 1):
    if os.fork() == 0: break
kept = []
def fill():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for one in pair:
        one.setblocking(False)
        try: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        except PermissionError: pass
        try:
            while True: one.send(b'x' * 200000)
        except BlockingIOError: pass
    return pair
way, kept_way = socket.socketpair()
try:
    for _ in range(4000):
        pair = fill()
        if PASSED:  # a socket in a message counts for none of the open files
            socket.send_fds(way, [b'x'], [one.fileno() for one in pair])
            for one in pair: one.close()
        else:
            kept.append(pair)
except OSError: pass
time.sleep(2)
raise SystemExit('refused')
"""
_PIPES = """
import fcntl, os, time
for _ in range(6):
    if os.fork() == 0: break
kept = []
try:
    for _ in range(2000):
        kept.append(os.pipe())
        os.set_blocking(kept[-1][1], False)
        try: fcntl.fcntl(kept[-1][1], 1031, 1 << 20)
        except PermissionError: pass
        try:
            while True: os.write(kept[-1][1], b'x' * 65536)
        except BlockingIOError: pass
except OSError: pass
time.sleep(2)
raise SystemExit('refused')
"""
_PAGE_TABLES = """
import ctypes
mmap = ctypes.CDLL(None).mmap
mmap.restype = ctypes.c_void_p
begin = mmap(None, ctypes.c_size_t(1 << 40), 1, 0x4022, -1, ctypes.c_long(0))  # private, anonymous, without reserve
for place in range(0, 1 << 40, 1 << 21): ctypes.string_at(begin + place, 1)
"""
_MEMFD = """
import os, time
held = os.memfd_create('held')
while True: os.write(held, bytes([1]) * (1 << 20))
"""
_SYSTEM_V = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(128):
    number = libc.shmget(0, ctypes.c_size_t(8 << 20), 0o1600)
    if number < 0: sys.exit('refused')
    place = libc.shmat(number, None, 0)
    libc.shmctl(number, 0, None)
    ctypes.memset(place, 1, 8 << 20)
time.sleep(60)
"""
_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0: break
held = bytearray(os.urandom(1)) * (45 << 20)
time.sleep(60)
"""
_COPIES = """
import os, time
held = bytearray(os.urandom(1)) * (150 << 20)
for _ in range(6):
    if os.fork() == 0: break
for place in range(0, len(held), 4096): held[place] = 7
time.sleep(60)
"""
_GENERATIONS = """
import os, time
held = bytearray(os.urandom(1)) * (60 << 20)  # shared by all, so that the sum of their sizes says nothing
if all(os.fork() for _ in range(3)): time.sleep(60)
time.sleep(0.5)
kept = []
for _ in range(20):  # a process takes pages, leaves them to its child and ends
    kept.append(bytearray(os.urandom(1)) * (5 << 20))
    while True:
        try: child = os.fork()
        except OSError: continue
        break
    if child: os._exit(0)
    time.sleep(0.05)
time.sleep(60)
"""
_AT_ONCE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for _ in range(6):
    if os.fork() == 0: break
size, private, populate, huge, fill = ctypes.c_size_t(180 << 20), 0x22, 0x8000, 14, 23
if libc.mmap(None, size, 3, private | populate, -1, ctypes.c_long(0)) == 2**64 - 1:
    place = libc.mmap(None, size, 3, private, -1, ctypes.c_long(0))
    libc.prctl(41, *map(ctypes.c_ulong, (0, 0, 0, 0)))
    libc.madvise(ctypes.c_void_p(place), size, huge)
    if libc.madvise(ctypes.c_void_p(place), size, fill):
        ctypes.memset(place, 1, 180 << 20)
time.sleep(60)
"""
_THREAD = """
import mmap, os, threading, time
def hold():
    held = []
    try:
        while True:
            held.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            held[-1].write(bytes([1]) * (1 << 20))
    except OSError:
        time.sleep(1)
        os._exit(3)
threading.Thread(target=hold).start()
"""
_LOCKED = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
held = ctypes.create_string_buffer(100 << 20)
if libc.mlock(held, ctypes.c_size_t(100 << 20)): sys.exit('refused')
"""
_SPLICED = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
class Part(ctypes.Structure):
    _fields_ = (('begin', ctypes.c_void_p), ('length', ctypes.c_size_t))
for _ in range(25):
    reading, writing = os.pipe()
    for _ in range(16):  # a page in a pipe keeps the huge page of which it is a part
        begin = libc.mmap(None, ctypes.c_size_t(4 << 20), 3, 0x22, -1, ctypes.c_long(0))
        even = (begin + (2 << 20) - 1) & -(2 << 20)
        libc.madvise(ctypes.c_void_p(even), ctypes.c_size_t(2 << 20), 14)
        ctypes.memset(even, 1, 2 << 20)
        if libc.vmsplice(writing, ctypes.byref(Part(even, 4096)), ctypes.c_ulong(1), 0) < 0: sys.exit('refused')
        libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(4 << 20))
time.sleep(60)
"""

HOLDING = {
    "private": "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "shared": _MAPPED.format(opened=_ANONYMOUS, hide=""),
    "shared, unmapped": _MAPPED.format(opened=_ANONYMOUS, hide=_HIDE),
    "zero": _MAPPED.format(opened=_ZERO, hide=""),
    "zero, unmapped": _MAPPED.format(opened=_ZERO, hide=_HIDE),
    "memory file": _MEMFD,
    "folder": _FILE.format(folder="."),
    "/dev/shm": _FILE.format(folder="/dev/shm"),
    "sockets": _SOCKETS.format(passed=False, processes=1),
    "sockets of many": _SOCKETS.format(passed=False, processes=7),
    "sockets in messages": _SOCKETS.format(passed=True, processes=7),
    "pipes": _PIPES,
    "page tables": _PAGE_TABLES,
    "System V": _SYSTEM_V,
    "children": _CHILDREN,
    "copies": _COPIES,
    "generations": _GENERATIONS,
    "filled at once": _AT_ONCE,
    "thread": _THREAD,
    "locked": _LOCKED,
    "spliced": _SPLICED,
}
"""Programs that hold more than 200 MiB if they can, by the kind of memory."""
