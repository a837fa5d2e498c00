"""Digests of files, which whoever writes or loads a file computes: of a checkpoint, the ranks.

The driver of a job writes the manifest of a checkpoint and reads none of its tensors. One process would take minutes to
read what hundreds of ranks wrote in seconds, and all of them would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from pathlib import Path

from xxhash import xxh3_128

CHECKSUM_KEY = "xxh3_128"  # the hash is fast and detects accidents; it does not protect against forgery
_READ_BYTES = 8 * 2**20

FileRecord = dict[str, int | str]  # size and digest of a file: "bytes" and CHECKSUM_KEY
FileRecords = Mapping[str, FileRecord]  # by the file's path in a folder
IsCancelled = Callable[[], bool]  # true: stop reading, because the result is no longer needed


def record_file(path: Path, is_cancelled: IsCancelled = lambda: False) -> FileRecord:
    """Compute a file's size and digest; CancelledError: cancelled."""
    digest, size = xxh3_128(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if is_cancelled():
                raise CancelledError
            digest.update(buffer[:count])
            size += count
    return {"bytes": size, CHECKSUM_KEY: digest.hexdigest()}
