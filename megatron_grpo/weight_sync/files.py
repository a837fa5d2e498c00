"""Refit through a folder that policy and engines share: `FileWriter` runs on ranks of the policy and writes the changed
tensors, `FilesTransport` runs on the driver, and `FilesReceiver` in an engine's worker reads them.

FOLDER/manifest.json        written last, by rename: readers see one version or the next, never a part of it
FOLDER/000001/rank-0-0000.safetensors
FOLDER/000002/rank-0-0000.safetensors      only the tensors that changed
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_grpo.config.generation_schema import RefitConfig, RefitMode
from megatron_grpo.generation.engine_group import VllmGeneration
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.models.hf_folder import save_tensors
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.observability.run_files import write_atomically
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.canary import Canary
from megatron_grpo.weight_sync.engine_layers import ModelReload
from megatron_grpo.weight_sync.transport import AttemptError, TransferReport, WeightTransport

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file with the newest values of one tensor."""

    file: str
    """Path inside the folder."""
    digest: str
    """`digest` of the tensor."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files that hold one version of the weights."""

    session: str
    """Identifies the start of the run that wrote it: version 3 of another run is not this version 3."""
    version: int
    tensors: Mapping[str, StoredTensor]
    """All tensors by their Hugging Face names, in the order of the layers."""

    def write(self, folder: Path) -> None:
        """Write the manifest, by which the folder holds this version."""
        content = json.dumps(asdict(self))
        text = json.dumps({"digest": _text_digest(content), "content": content})
        write_atomically(folder / MANIFEST, lambda path: path.write_text(text))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of the version that the folder holds.

        Raises:
            ValueError: the manifest is missing or damaged.
        """
        path = folder / MANIFEST
        try:
            whole = json.loads(path.read_text())
            intact = whole["digest"] == _text_digest(whole["content"])
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read: {error.strerror}; refit.directory has to be a folder that policy and "
                "engines share, under the same path"
            ) from None
        except (ValueError, TypeError, KeyError):
            intact = False
        if not intact:
            raise ValueError(f"{path} is damaged")
        content = json.loads(whole["content"])
        tensors = {name: StoredTensor(**one) for name, one in content["tensors"].items()}
        return Manifest(content["session"], content["version"], tensors)


def digest(tensor: Tensor) -> str:
    """XXH3 (128 bits) of dtype, shape and values, as hexadecimal digits: finds damage, not malice.

    Args:
        tensor: [...], contiguous, on the CPU.
    """
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def remove_unread(folder: Path, manifest: Manifest) -> None:
    """Delete the files that hold no tensor of this version; no process may be reading an earlier version."""
    kept = {folder / one.file for one in manifest.tensors.values()}
    for file in folder.glob("*/*"):
        if file not in kept:
            file.unlink()
    for part in folder.iterdir():
        if part.is_dir() and not any(part.iterdir()):
            part.rmdir()


def _text_digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


@dataclass(slots=True)
class FileWriter:
    """Writes the tensors of one stage that have changed since the last version."""

    folder: Path
    bucket_bytes: int
    """Size of a file and of the copy in memory; a single larger tensor exceeds it."""
    _stored: dict[str, StoredTensor] = field(default_factory=dict)

    def write(
        self, tensors: Iterable[tuple[str, Tensor | None]], part: str, rank: int, *, whole: bool
    ) -> dict[str, StoredTensor]:
        """Write one version of the stage's weights.

        Args:
            tensors: (name, full tensor [...]); None in place of the tensor on ranks that do not write.
            part: subfolder of this version.
            rank: the rank that writes.
            whole: write all tensors, changed or not.

        Returns:
            The file of every tensor, in their order; empty on ranks that do not write.
        """
        before, self._stored = ({} if whole else self._stored), {}
        (self.folder / part).mkdir(exist_ok=True)
        found: dict[str, StoredTensor] = {}
        bucket: dict[str, Tensor] = {}
        used = 0
        files = (f"{part}/rank-{rank}-{number:04d}.safetensors" for number in count())
        file = next(files)
        for name, tensor in tensors:
            if tensor is None:
                continue
            # A copy: tensors may be views of one parameter, which safetensors does not write.
            held = tensor.to("cpu", copy=True).contiguous()
            known, found_digest = before.get(name), digest(held)
            if known is not None and known.digest == found_digest:
                found[name] = known
                continue
            if bucket and used + held.nbytes > self.bucket_bytes:
                write_atomically(self.folder / file, partial(save_tensors, bucket))
                bucket, used, file = {}, 0, next(files)
            bucket[name] = held
            used += held.nbytes
            found[name] = StoredTensor(file, found_digest, held.nbytes)
        if bucket:
            write_atomically(self.folder / file, partial(save_tensors, bucket))
        self._stored = found  # set at the end: after a failure all tensors are written again
        return found


_writer: FileWriter | None = None
"""The writer of this process, which is one rank of the policy."""


def connect_writer(_rank: PolicyRank, folder: Path, bucket_bytes: int) -> None:
    """Make this process's writer for an existing folder; the first version that it writes is whole."""
    global _writer
    _writer = FileWriter(folder, bucket_bytes)


def write_weights(rank: PolicyRank, part: str, whole: bool) -> dict[str, StoredTensor]:
    """Write this stage's weights, gathered over its ranks (`FileWriter.write`)."""
    from torch.distributed import get_rank

    assert _writer is not None, "connect_writer() comes first"
    tensors = iter_hf_tensors(rank.gather_chunks(), rank.shape)
    try:
        return _writer.write(tensors, part, get_rank(), whole=whole)
    finally:
        for _ in tensors:  # gathering is collective: a rank that cannot write takes part to the end
            pass


class FilesReceiver:
    """The receiving end of a refit in a worker: reads the folder.

    Args:
        worker: vLLM's worker, with a loaded model.
        shared: the `folder` of the weights, and the `session` of the run that writes there.
        number: unused; other receivers get the worker's number here.

    Raises:
        ValueError: the folder is not the one that the policy writes to.
    """

    def __init__(self, worker: Any, shared: Mapping[str, str], number: int) -> None:
        self._reload = ModelReload(worker)
        self.abandon = self._reload.abandon
        self._folder, self._session = Path(shared["folder"]), shared["session"]
        self._held: dict[str, str] = {}
        """Digest of each tensor that the model certainly holds."""
        self._wanted: dict[str, StoredTensor] = {}
        self._read_manifest()

    def receive(self, version: int) -> None:
        """Verify all tensors of a version that must be loaded, then load them.

        Raises:
            ValueError: the folder has another version, or a file is missing or damaged. The model is unchanged.
        """
        manifest = self._read_manifest()
        if manifest.version != version:
            raise ValueError(f"{self._folder} holds version {manifest.version}, not {version}")
        changed = [name for name, one in manifest.tensors.items() if self._held.get(name) != one.digest]
        # vLLM converts a layer only when all of its tensors have come.
        blocks = {_block(name) for name in changed}
        self._wanted = {name: one for name, one in manifest.tensors.items() if _block(name) in blocks}
        for name, tensor in self._tensors():
            if digest(tensor.contiguous()) != self._wanted[name].digest:
                raise ValueError(f"{self._folder / self._wanted[name].file}: {name} is not what was written")
        if not self._wanted:
            return
        held, self._held = self._held, {}  # empty while loading: a failure leaves unknown contents
        self._reload.begin()
        self._reload.load(self._tensors())
        self._reload.finish()
        self._held = held | {name: one.digest for name, one in self._wanted.items()}

    def _read_manifest(self) -> Manifest:
        manifest = Manifest.read(self._folder)
        if manifest.session != self._session:
            raise ValueError(f"another run writes to {self._folder}; give each its own refit.directory")
        return manifest

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor [...] on the CPU) of the tensors that must be loaded, in the order of the layers."""
        for name, one in self._wanted.items():
            try:
                with safe_open(self._folder / one.file, framework="pt") as file:
                    tensor = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self._folder / one.file}: {name} cannot be read: {error}") from None
            yield name, tensor


def _block(name: str) -> str:
    """The block that a tensor is loaded with, like "model.layers.3.self_attn"; vLLM joins matrices only inside one."""
    parts = name.split(".")
    layer = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return name if layer is None else ".".join(parts[: layer + 2])


UNREAD_SHARE = 2.0
"""When the files hold more than this many times the bytes of a version, the next version is written whole."""

FOLDER = "refit"
"""Name of the folder in the run's folder, unless `refit.directory` is set."""


class FilesTransport(WeightTransport):
    """Transport through a folder: `refit` in `run_dir`, or one of the run's own in `refit.directory`. Engines only have
    to see the folder, so they may be servers outside of the run."""

    mode: ClassVar[RefitMode] = "files"

    def __init__(
        self,
        policy: MegatronPolicy,
        generation: VllmGeneration,
        config: RefitConfig,
        run_dir: Path,
        canary: Canary | None = None,
    ) -> None:
        super().__init__(policy, generation, config, canary)
        run_dir = run_dir.absolute()
        if config.directory is None:
            self._folder = run_dir / FOLDER
        else:  # each run has its own folder inside, since several runs may share refit.directory
            run = hashlib.blake2b(str(run_dir).encode(), digest_size=6).hexdigest()
            self._folder = Path(config.directory).absolute() / f"{run_dir.name}-{run}"
        self._session = secrets.token_hex(8)
        self._written = 0
        self._whole = True
        """Whether the next version is written whole."""

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _connect(self, engines: tuple[int, ...]) -> None:
        """Tell engines the folder's path; at first and after a failure begin with an empty folder."""
        writers = []
        if not self._linked:  # no engine reads the folder now
            with _disk_errors_as_attempts(self._folder):
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
                Manifest(self._session, -1, {}).write(self._folder)
            self._whole = True
            writers = self._policy.submit(connect_writer, self._folder, self._bucket_bytes)
        shared = {"folder": str(self._folder), "session": self._session}
        answers = self._on_engines(engines, Engine.connect_weights, self.mode, shared, 0)
        deadline = time.monotonic() + self._timeout_s
        self._complete(writers, answers, deadline, "connecting the refit")
        self._linked = engines

    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        deadline = time.monotonic() + self._timeout_s
        self._written += 1
        part = f"{self._written:06d}"
        stages = self._complete(
            self._policy.submit(write_weights, part, self._whole), {}, deadline, f"writing version {version}"
        )
        tensors: dict[str, StoredTensor] = {name: one for stage in stages for name, one in stage.items()}
        manifest = Manifest(self._session, version, tensors)
        with _disk_errors_as_attempts(self._folder):
            manifest.write(self._folder)
        self._begin_checks()
        receives = self._on_engines(engines, Engine.receive_weights, version)
        self._complete([], receives, deadline, f"refit of version {version}")
        self._commit(version, engines, deadline)
        with _disk_errors_as_attempts(self._folder):
            remove_unread(self._folder, manifest)
            held = sum(file.stat().st_size for file in self._folder.glob("*/*"))
        self._whole = held > UNREAD_SHARE * sum(one.nbytes for one in tensors.values())
        new = [one for one in tensors.values() if one.file.startswith(f"{part}/")]
        return TransferReport(
            version=version,
            bytes_sent=sum(one.nbytes for one in new),
            tensors=len(new),
            buckets=len({one.file for one in new}),
        )


@contextmanager
def _disk_errors_as_attempts(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AttemptError(f"the folder of the refit, {folder}, cannot be written: {error.strerror}", {}) from error
