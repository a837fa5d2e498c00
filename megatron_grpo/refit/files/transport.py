"""Refit through a folder: the policy writes what has changed, then every engine reads it."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import ray

from megatron_grpo.config.generation_schema import RefitConfig, RefitMode
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.refit.files.receiver import SharedFolder
from megatron_grpo.refit.files.sender import connect_writer, write_weights
from megatron_grpo.refit.files.store import Manifest, Stored, emptied, remove_unread
from megatron_grpo.refit.interface import TransferReport
from megatron_grpo.refit.transport import AttemptError, EngineTransport

UNREAD_SHARE = 2.0
"""When files hold so many times what a version needs, the next one is written whole."""

FOLDER = "refit"
"""Folder of the weights in that of the run, unless `refit.directory` names another place."""


class FilesTransport(EngineTransport):
    """Needs nothing of the engines but that they see the folder; so these may be outside of the run."""

    mode: ClassVar[RefitMode] = "files"

    def __init__(self, policy: MegatronPolicy, generation: VllmGeneration, config: RefitConfig, run_dir: Path) -> None:
        """
        Args:
            policy: whose weights.
            generation: the engines that get them.
            config: the folder, its files' size, deadline and attempts.
            run_dir: the run's folder.
        """
        super().__init__(policy, generation, config)
        self._folder = _folder(config, run_dir.absolute())
        self._session = secrets.token_hex(8)
        self._written = 0
        self._whole = True
        self._readers: set[int] = set()
        """Engines that know the folder."""
        self._payload: Counter[str] = Counter()
        """Bytes of tensors that were written to each file that is still there."""

    def connect(self) -> None:
        self._linked = ()  # engines may have been connected in another way since
        super().connect()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _replace(self, lost: Mapping[int, str]) -> None:
        super()._replace(lost)
        self._readers -= lost.keys()

    def _connect(self, engines: tuple[int, ...]) -> None:
        """Tell engines of the folder that do not know it; at first and after a failure begin with an empty one."""
        writers = [] if self._linked else self._begin_anew()
        new = [engine for engine in engines if engine not in self._readers]
        shared = asdict(SharedFolder(str(self._folder), self._session))
        answers = self._generation.submit_each("connect_weights", [(self.mode, shared, 0)] * len(new), new)
        deadline = time.monotonic() + self._timeout_s
        self._complete(writers, dict(zip(new, answers, strict=True)), deadline, "connecting the refit")
        self._readers |= set(new)
        self._linked = engines

    def _begin_anew(self) -> list[ray.ObjectRef]:
        """Empty the folder, of which nobody has read anything any more, and let writers begin."""
        with _disk_errors_told(self._folder):
            emptied(self._folder)
            Manifest(self._session, -1, {}).write(self._folder)
        self._whole = True
        self._readers = set()
        return self._policy.submit(connect_writer, self._folder, self._bucket_bytes)

    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        deadline = time.monotonic() + self._timeout_s
        self._written += 1
        part = f"{self._written:06d}"
        stages = self._complete(
            self._policy.submit(write_weights, part, self._whole), {}, deadline, f"writing version {version}"
        )
        tensors: dict[str, Stored] = {name: one for stage in stages for name, one in stage.items()}
        manifest = Manifest(self._session, version, tensors)
        with _disk_errors_told(self._folder):
            manifest.write(self._folder)
        receives = self._on_engines("receive_weights", version, engines)
        self._complete([], receives, deadline, f"refit of version {version}")
        self._commit(version, engines, deadline)
        with _disk_errors_told(self._folder):
            remove_unread(self._folder, manifest)
        new = [one for one in tensors.values() if one.file.startswith(f"{part}/")]
        for one in new:
            self._payload[one.file] += one.nbytes
        self._payload = Counter({file: self._payload[file] for file in manifest.files})
        self._whole = self._payload.total() > UNREAD_SHARE * manifest.nbytes
        return TransferReport(
            version=version,
            bytes_sent=sum(one.nbytes for one in new),
            tensors=len(new),
            buckets=len({one.file for one in new}),
            seconds=0.0,
        )


def _folder(config: RefitConfig, run_dir: Path) -> Path:
    """The folder of this run's weights: runs that share `refit.directory` have one each."""
    if config.directory is None:
        return run_dir / FOLDER
    run = hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()
    return Path(config.directory).absolute() / f"{run_dir.name}-{run}"


@contextmanager
def _disk_errors_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AttemptError(f"the folder of the refit, {folder}, cannot be written: {error.strerror}", {}) from error
