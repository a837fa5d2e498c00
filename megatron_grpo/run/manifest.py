"""What lets a checkpoint be told from a damaged one: digests of all its files, written when everything else is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from xxhash import xxh3_128

from megatron_grpo.config.errors import RunError

MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_SEAL = "xxh3_128"
"""Key of a digest, in the manifest and as the first of a sealed file. The hash is fast and finds accidents; it keeps
nobody from forging."""
_SEAL_LINE = re.compile(rb'\{"xxh3_128": "([0-9a-f]{32})",\n')
_READ_BYTES = 8 * 2**20
_THREADS = 8
"""Files that are read at a time. One thread hashes faster than a disk reads; many readers are what a file system over a
network needs."""

T = TypeVar("T")
Cancelled = Callable[[], bool]
"""Whether to stop reading: the result is not wanted any more."""


class CheckpointError(RunError):
    """A checkpoint that is incomplete or damaged; the text names folder and file and says what is wrong."""


class LaterFormatError(RunError):
    """A checkpoint that nothing is wrong with, written by a later version of this package."""


def write_manifest(folder: Path, step: int, sealed: Collection[str]) -> None:
    """Record size and digest of every file in the folder, as its last file; everything is on disk when this returns.

    Args:
        folder: a checkpoint that is complete but for the manifest.
        step: training steps before the checkpoint.
        sealed: names of files that `write_sealed` wrote: they carry their own digest, so that they may be replaced
            later without touching the manifest. They have to be there, too.
    """
    entries = sorted(folder.rglob("*"))
    files = [path for path in entries if path.is_file() and path.relative_to(folder).as_posix() not in sealed]

    def synced_record(path: Path, cancelled: Cancelled) -> dict[str, Any]:
        sync(path)
        return _record(path, cancelled)

    records = _in_threads(synced_record, files, Event())
    for inner in (path for path in entries if path.is_dir()):
        sync(inner)
    by_name = {path.relative_to(folder).as_posix(): record for path, record in zip(files, records, strict=True)}
    manifest = {"format": _FORMAT, "step": step, "sealed": sorted(sealed), "files": by_name}
    write_sealed(folder / MANIFEST_FILE, manifest)


def verify_manifest(folder: Path, stop: Event | None = None) -> int:
    """Compare every file of a checkpoint with what its manifest says; the step that it was written after.

    Args:
        folder: folder of a checkpoint, with the manifest in it.
        stop: set by another thread to end this early, with CancelledError.

    Raises:
        CheckpointError: a file is missing or differs.
        LaterFormatError: the manifest is of a format that this version does not know.
        OSError: a file is there and cannot be read.
    """
    manifest = read_sealed(folder / MANIFEST_FILE)
    if manifest["format"] != _FORMAT:
        text = f"was written by a later version (format {manifest['format']}; this version reads {_FORMAT})"
        raise LaterFormatError(f"{folder} {text}")
    files: dict[str, dict[str, Any]] = manifest["files"]
    for name, record in files.items():  # sizes first: they cost nothing
        _require_size(folder / name, record["bytes"])
    for name in manifest["sealed"]:
        read_sealed(folder / name)
    expected = {folder / name: record for name, record in files.items()}

    def compare(path: Path, cancelled: Cancelled) -> None:
        if _record(path, cancelled) != expected[path]:
            raise CheckpointError(_changed(path))

    _in_threads(compare, list(expected), stop or Event())
    return int(manifest["step"])


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object whose first entry is the digest of the rest; readers see the old or the new file.

    Args:
        path: file to write or replace.
        content: entries of the file, at least one; each gets a line of its own.
    """
    entries = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    body = f"{entries}\n}}\n".encode()
    write_in_one_piece(path, f'{{"{_SEAL}": "{xxh3_128(body).hexdigest()}",\n'.encode() + body)


def write_in_one_piece(path: Path, content: bytes) -> None:
    """Write or replace a file; it is on disk when this returns, and readers see the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def read_sealed(path: Path) -> dict[str, Any]:
    """The content that `write_sealed` was given.

    Raises:
        CheckpointError: the file is missing, or one of its bytes is not as it was written.
        OSError: the file is there and cannot be read.
    """
    with missing_is_an_error(path):
        written = path.read_bytes()
    line = _SEAL_LINE.match(written)
    if line is None or xxh3_128(written[line.end() :]).hexdigest().encode() != line[1]:
        raise CheckpointError(_changed(path))
    content: dict[str, Any] = json.loads(written)
    del content[_SEAL]
    return content


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Whether this was read from a file that `write_sealed` wrote."""
    return _SEAL in content


@contextmanager
def missing_is_an_error(path: Path) -> Iterator[None]:
    """Around reading a file of a checkpoint: turns its absence into a CheckpointError that names it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is missing: a folder is in its place") from None


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _changed(path: Path) -> str:
    return f"{path} is damaged: its content is not what was written (the digest differs)"


def _require_size(path: Path, size: int) -> None:
    with missing_is_an_error(path):
        found = path.stat()
    if path.is_dir():
        raise CheckpointError(f"{path} is missing: a folder is in its place")
    if found.st_size != size:
        raise CheckpointError(f"{path} is damaged: it has {found.st_size} bytes, and {size} were written")


def _record(path: Path, cancelled: Cancelled) -> dict[str, Any]:
    """Size and digest of a file, read in pieces."""
    digest, size = xxh3_128(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with missing_is_an_error(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if cancelled():
                raise CancelledError
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, _SEAL: digest.hexdigest()}


def _in_threads(function: Callable[[Path, Cancelled], T], paths: Sequence[Path], stop: Event) -> list[T]:
    """function(path, cancelled) of every path. What ends this early, Ctrl-C included, ends the threads."""
    failed = Event()
    pool = ThreadPoolExecutor(_THREADS, "checkpoint-digest")
    try:
        return list(pool.map(lambda path: function(path, lambda: failed.is_set() or stop.is_set()), paths))
    except BaseException:
        failed.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
