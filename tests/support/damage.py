"""What can happen to files: damage of every kind, and an end of the process at any point of what it does to them."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
"""Audit events of what changes a folder; the kernel keeps what a process had done before it was killed."""


def flip(file: Path, position: int | None = None) -> None:
    """Change one byte, in the middle if no position is given."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 0x5A
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def truncate_file(file: Path) -> None:
    os.truncate(file, 0)


def extend(file: Path) -> None:
    with file.open("ab") as end:
        end.write(b"\0")


def replace_content(file: Path) -> None:
    """Other content of the same size."""
    file.write_bytes(bytes(range(256)) * (file.stat().st_size // 256) + b"x" * (file.stat().st_size % 256))


def delete(file: Path) -> None:
    file.unlink()


def make_a_folder_of_it(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: tuple[Callable[[Path], None], ...] = (
    flip,
    truncate,
    truncate_file,
    extend,
    replace_content,
    delete,
    make_a_folder_of_it,
)


def files_of(folder: Path) -> list[str]:
    """Every file below a folder, hidden ones too, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def every_kill(origin: Path, scratch: Path, action: Callable[[Path], object]) -> Iterator[Path]:
    """Copies of `origin`, killed at every point of `action` but the last.

    A point is before something in the folder is opened for writing, made, renamed or removed.
    """
    for point in range(1, 1000):
        copy = scratch / f"killed_at_{point}"
        shutil.copytree(origin, copy)
        killed = _run_until(point, copy, action)
        yield copy
        if not killed:
            return
    raise AssertionError("more points than expected")


def _run_until(point: int, folder: Path, action: Callable[[Path], object]) -> bool:
    """action(folder) in a process of its own that dies at the point; False: it came to its end before."""
    child = os.fork()
    if child == 0:
        lines = 0

        def die_at_point(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal lines
            changes = event in _EVENTS and not (event == "open" and not int(str(arguments[2])) & _WRITING)
            if changes and str(arguments[0]).startswith(str(folder)):
                lines += 1
                if lines == point:
                    os._exit(9)

        sys.addaudithook(die_at_point)
        try:
            action(folder)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), f"the action failed before point {point}"
    return code == 9
