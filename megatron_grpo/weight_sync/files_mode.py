"""Runs on the driver: brings weights into engines through a folder (`refit.mode=files`)."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.observability.run_files import write_atomically
from megatron_grpo.weight_sync.file_writer import connect_folder, send_files
from megatron_grpo.weight_sync.refit_calls import AttemptError, RefitCalls
from megatron_grpo.weight_sync.transfer_modes import TransferMode, TransferReport
from megatron_grpo.weight_sync.weights_folder import MANIFEST, Manifest, WrittenTensor, compute_text_digest

# When the files hold more than this many times the bytes of a version, the next version is written completely.
_UNREAD_SHARE = 2.0


class FilesMode(TransferMode):
    """Weights in a folder that engines only have to see: the run's own in `config.directory`, or in `run_dir`."""

    def __init__(self, calls: RefitCalls, config: RefitConfig, run_dir: Path) -> None:
        super().__init__(calls, config)
        run_dir = run_dir.absolute()
        if config.directory is None:
            self.folder = run_dir / "refit"
        else:  # each run has its own folder inside, since several runs may share refit.directory
            run = hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()
            self.folder = Path(config.directory).absolute() / f"{run_dir.name}-{run}"
        self.session = secrets.token_hex(8)
        self._writes, self._rewrites = 0, True  # versions written; whether the next one is written completely

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self, engines: tuple[int, ...], *, anew: bool) -> None:
        writers = []
        if anew:  # no engine reads the folder now
            with _disk_errors_as_attempts(self.folder):
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True)
                write_manifest(self.folder, Manifest(self.session, -1, {}))
            self._rewrites = True
            writers = self.calls.policy.submit(connect_folder, self.folder, self.bucket_bytes)
        receives = self.connect_engines(engines, "files", {"folder": str(self.folder), "session": self.session})
        self.calls.wait(writers, receives, time.monotonic() + self.config.timeout_s, "connecting the refit")

    def send(
        self, version: int, engines: tuple[int, ...], deadline: float, on_sent: Callable[[], None]
    ) -> TransferReport:
        self._writes += 1
        part = f"{self._writes:06d}"
        sends = self.calls.policy.submit(send_files, part, self._rewrites)
        stages = self.calls.wait(sends, {}, deadline, f"writing version {version}")
        tensors: dict[str, WrittenTensor] = {name: tensor for stage in stages for name, tensor in stage.items()}
        manifest = Manifest(self.session, version, tensors)
        with _disk_errors_as_attempts(self.folder):
            write_manifest(self.folder, manifest)
        on_sent()
        receives = self.calls.call_engines(engines, Engine.receive_weights, version)
        self.calls.wait([], receives, deadline, f"refit of version {version}")
        with _disk_errors_as_attempts(self.folder):
            remove_unread(self.folder, manifest)
            stored_bytes = sum(file.stat().st_size for file in self.folder.glob("*/*"))
        self._rewrites = stored_bytes > _UNREAD_SHARE * sum(tensor.nbytes for tensor in tensors.values())
        changed = [tensor for tensor in tensors.values() if tensor.file.startswith(f"{part}/")]
        nbytes, files = sum(tensor.nbytes for tensor in changed), {tensor.file for tensor in changed}
        return TransferReport(version, nbytes, len(changed), len(files))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, by which the folder holds this version."""
    content = json.dumps(asdict(manifest))
    text = json.dumps({"digest": compute_text_digest(content), "content": content})
    write_atomically(folder / MANIFEST, lambda path: path.write_text(text))


def remove_unread(folder: Path, manifest: Manifest) -> None:
    """Delete the files that hold no tensor of this version."""
    read_files = {folder / tensor.file for tensor in manifest.tensors.values()}
    for file in folder.glob("*/*"):
        if file not in read_files:
            file.unlink()
    for part in folder.iterdir():
        if part.is_dir() and not any(part.iterdir()):
            part.rmdir()


@contextmanager
def _disk_errors_as_attempts(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AttemptError(f"the folder of the refit, {folder}, cannot be written: {error.strerror}", {}) from error
