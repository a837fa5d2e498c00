"""Files of one checkpoint: the driver's files beside the models' folders, and the manifest to verify all.

The manifest is ours because torch's and Megatron-Core's distributed checkpoints record no digests of their files:
damage would be found after minutes of start-up, or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from xxhash import xxh3_128

from megatron_grpo.config.errors import RunError, select_first_line, to_text
from megatron_grpo.config.outside_files import parse_file_json, read_bytes, require_regular
from megatron_grpo.models import image_store
from megatron_grpo.models.image_store import STORE_FOLDER
from megatron_grpo.observability.file_digests import CHECKSUM_KEY, FileRecord, FileRecords, IsCancelled, record_file
from megatron_grpo.observability.run_files import sync, write_atomically, write_text
from megatron_grpo.run.directory import POLICY_FOLDER

MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_CHECKSUM_LINE = re.compile(rb'\{"xxh3_128": "([0-9a-f]{32})",\n')
_THREADS = 8  # one thread hashes faster than a local disk reads, but network file systems need many readers

STATE_FILE = "state.json"
LOADER_FILE = "dataloader.pt"
# Files that Megatron-Core wrote beside the tensors, in every layout, when checkpoints had no manifest.
_MODEL_FILES = (".metadata", "common.pt", "metadata.json")

T = TypeVar("T")


ReadContents = Callable[[Path, Mapping[Path, FileRecord]], Mapping[Path, FileRecord]]
"""Given a checkpoint and its manifest's records, returns records of (some of) the files as they are now."""


class CheckpointError(RunError):
    """A checkpoint is incomplete or damaged; the message names the file."""


def write_with_checksum(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically write a JSON object after a line with its digest."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    body = f"{lines}\n}}\n".encode()
    line = f'{{"{CHECKSUM_KEY}": "{xxh3_128(body).hexdigest()}",\n'
    write_atomically(path, lambda temporary: temporary.write_bytes(line.encode() + body))


def read_with_checksum(path: Path) -> dict[str, Any]:
    """Read a file of `write_with_checksum`, if no byte has changed."""
    with missing_file_errors(path):
        written = read_bytes(path)
    line = _CHECKSUM_LINE.match(written)
    if line is None or xxh3_128(written[line.end() :]).hexdigest().encode() != line[1]:
        raise CheckpointError(_describe_damage(path))
    try:
        content: dict[str, Any] = parse_file_json(written)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    del content[CHECKSUM_KEY]
    return content


@contextmanager
def missing_file_errors(path: Path) -> Iterator[None]:
    """Turn the absence of a regular file into a CheckpointError that names it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is missing: a folder is in its place") from None
    except ValueError as error:  # a pipe, or larger than such files are
        raise CheckpointError(str(error)) from None


def _describe_damage(path: Path) -> str:
    return f"{path} is damaged: its content is not what was written (the digest differs)"


def _make_record(path: Path, is_cancelled: IsCancelled) -> FileRecord:
    with missing_file_errors(path):
        return record_file(path, is_cancelled)


def _map_in_threads(function: Callable[[Path, IsCancelled], T], paths: Sequence[Path], stop: Event) -> list[T]:
    """Call a function for every path in threads; errors cancel all."""
    has_failed = Event()
    pool = ThreadPoolExecutor(_THREADS, "checkpoint-digest")
    try:
        return list(pool.map(lambda path: function(path, lambda: has_failed.is_set() or stop.is_set()), paths))
    except BaseException:
        has_failed.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def write_driver_files(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    loader_state: Mapping[str, Any],
    written: FileRecords | None = None,
) -> None:
    """Add the driver's files to those of the models, and sync all.

    Args:
        folder: the checkpoint, perhaps under a temporary name.
        step: training steps before it.
        state: progress ("save_state"), metrics and the rest that the driver needs to continue (JSON).
        loader_state: that of the training data.
        written: records by the ranks of the files that they wrote and synced; this process reads the others.

    CheckpointError: this process does not see a file of the ranks, or sees another size.
    """
    import torch  # imported here: a command that only verifies a checkpoint starts at once

    torch.save(dict(loader_state), folder / LOADER_FILE)
    write_with_checksum(folder / STATE_FILE, state)
    expected = {folder / name: record for name, record in (written or {}).items()}
    _require_sizes(expected)
    paths = sorted(folder.rglob("*"))
    # The state has its own digest instead of one in the manifest, so that it can be replaced without a new manifest.
    files = [path for path in paths if path.is_file() and path != folder / STATE_FILE]

    def sync_and_record(path: Path, is_cancelled: IsCancelled) -> FileRecord:
        if path in expected:
            return expected[path]
        sync(path)
        return _make_record(path, is_cancelled)

    records = _map_in_threads(sync_and_record, files, Event())
    for inner in (path for path in paths if path.is_dir()):
        sync(inner)
    by_name = {path.relative_to(folder).as_posix(): record for path, record in zip(files, records, strict=True)}
    # The manifest comes last: with it the checkpoint is complete.
    write_with_checksum(folder / MANIFEST_FILE, {"format": _FORMAT, "step": step, "files": by_name})


def copy_images(digests: Iterable[str], source: Path, target: Path) -> None:
    """Copy images of a run's folder or checkpoint to another.

    CheckpointError: one is not there, or was changed.
    """
    try:
        image_store.copy_images(digests, source / STORE_FOLDER, target / STORE_FOLDER)
    except ValueError as error:
        raise CheckpointError(f"{source} cannot be used: {error}") from None


def _require_sizes(expected: Mapping[Path, FileRecord]) -> None:
    """Require that files have the sizes that were written, without reading them."""
    for path, record in expected.items():
        with missing_file_errors(path):
            require_regular(path)
            size = path.stat().st_size
        if size != record["bytes"]:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, and {record['bytes']} were written")


def replace_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Atomically replace the driver's state in a checkpoint."""
    if (folder / MANIFEST_FILE).exists():
        write_with_checksum(folder / STATE_FILE, state)
    else:  # an earlier version wrote it: a state with a digest would mean that its manifest is lost
        write_text(folder / STATE_FILE, json.dumps(dict(state)))


def verify_checkpoint(folder: Path, stop: Event | None = None, read_contents: ReadContents | None = None) -> str | None:
    """Compare all files of a checkpoint with its manifest.

    Returns a remark for the user about an intact checkpoint, or None. Setting `stop` raises CancelledError early.
    `read_contents` computes the digests of files elsewhere, for example on the ranks; None: this process reads all.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
        RunError: a later version wrote the checkpoint.
        OSError: a file is there and cannot be read.
    """
    if not (folder / MANIFEST_FILE).exists():
        return _verify_without_manifest(folder)
    step, expected = _read_manifest(folder)
    # Sizes first: reading them costs nothing, and finds most interrupted copies.
    _require_sizes(expected)
    recorded_step = read_state(folder)["save_state"]["total_steps"]
    if recorded_step != step:
        text = f"is that of another checkpoint: of step {recorded_step}, not {step}"
        raise CheckpointError(f"{folder / STATE_FILE} {text}")
    elsewhere = {} if read_contents is None else read_contents(folder, expected)

    def compare(path: Path, is_cancelled: IsCancelled) -> None:
        record = elsewhere[path] if path in elsewhere else _make_record(path, is_cancelled)
        if record != expected[path]:
            raise CheckpointError(_describe_damage(path))

    _map_in_threads(compare, list(expected), stop or Event())
    return None


def leave_models_unread(folder: Path, expected: Mapping[Path, FileRecord]) -> Mapping[Path, FileRecord]:
    """Trust the manifest about files that ranks will read."""
    return {path: record for path, record in expected.items() if path.parent != folder}


def _read_manifest(folder: Path) -> tuple[int, dict[Path, FileRecord]]:
    """Read the step of a checkpoint, and the records of its files."""
    path = folder / MANIFEST_FILE
    manifest = read_with_checksum(path)
    if manifest.get("format") != _FORMAT:
        formats = f"format {to_text(manifest.get('format'))}; this version reads {_FORMAT}"
        raise RunError(f"{folder} was written by a later version ({formats})")
    files, step = manifest.get("files"), manifest.get("step")
    if not isinstance(files, dict) or not isinstance(step, int):
        raise CheckpointError(f"{path} is damaged: it has no files, or no step")
    for name, record in files.items():
        if name.startswith("/") or ".." in Path(name).parts:
            raise CheckpointError(f"{path} is damaged: {to_text(name)} is outside the checkpoint")
        if not isinstance(record, dict) or type(record.get("bytes")) is not int:
            raise CheckpointError(f"{path} is damaged: it has no size of {to_text(name)}")
    return step, {folder / name: record for name, record in files.items()}


def read_state(folder: Path) -> dict[str, Any]:
    """Read the driver's state, or raise CheckpointError if it is damaged."""
    path, has_manifest = folder / STATE_FILE, (folder / MANIFEST_FILE).exists()
    try:
        if has_manifest:
            state = read_with_checksum(path)
        else:
            with missing_file_errors(path):
                content = read_bytes(path)
            state = parse_file_json(content)
            if CHECKSUM_KEY in state:
                raise CheckpointError(f"{folder / MANIFEST_FILE} is missing")
        if not (isinstance(state["save_state"]["total_steps"], int) and isinstance(state["metrics"], dict)):
            raise TypeError("steps or metrics are of another type")
    except (ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{path} is damaged: it does not hold the state of a run ({error})") from None
    return dict(state)


def read_loader_state(folder: Path) -> dict[str, Any]:
    """Read the loader's state, or raise CheckpointError if it is damaged."""
    import torch

    path = folder / LOADER_FILE
    with missing_file_errors(path):
        require_regular(path)
    try:
        state = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # torch.load raises errors of many classes for a damaged file
        text = f"{type(error).__name__}: {select_first_line(error)}"
        raise CheckpointError(f"{path} is damaged: it cannot be loaded ({text})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it does not hold the state of a data loader")
    return state


def _verify_without_manifest(folder: Path) -> str:
    """Check a checkpoint of an earlier version; returns a remark."""
    with missing_file_errors(folder):
        if not any(folder.iterdir()):
            raise CheckpointError(f"{folder} is empty")
    read_state(folder)
    for name in (LOADER_FILE, *(f"{POLICY_FOLDER}/{name}" for name in _MODEL_FILES)):
        with missing_file_errors(folder / name):
            if (folder / name).stat().st_size == 0:
                raise CheckpointError(f"{folder / name} is empty")
    read_loader_state(folder)
    return f"{folder} was written by an earlier version, without digests: damage to its weights would not be noticed"
