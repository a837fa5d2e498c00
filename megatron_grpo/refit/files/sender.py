"""The policy's half of a refit through files: functions that run on every rank; the first of each stage writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.refit.files.store import Stored, digest, written_whole

if TYPE_CHECKING:
    from megatron_grpo.policy.rank.policy_rank import PolicyRank


@dataclass(slots=True)
class FileWriter:
    """Writes the tensors of one stage that have changed since the last version."""

    folder: Path
    bucket_bytes: int
    """Size of a file, and of what is held in memory; more where a single tensor is larger."""
    _stored: dict[str, Stored] = field(default_factory=dict)

    def write(
        self, tensors: Iterable[tuple[str, Tensor | None]], part: str, rank: int, *, whole: bool
    ) -> dict[str, Stored]:
        """Write one version of the stage's weights.

        Args:
            tensors: (name, full tensor [...]); None in place of the tensor on ranks that do not write.
            part: folder inside the folder, of this version alone.
            rank: the rank that writes.
            whole: write all tensors, changed or not.

        Returns:
            Of every tensor, in their order, where its values are; empty on ranks that do not write.
        """
        before, self._stored = ({} if whole else self._stored), {}
        (self.folder / part).mkdir(exist_ok=True)
        found: dict[str, Stored] = {}
        files = (f"{part}/rank-{rank}-{number:04d}.safetensors" for number in range(10**6))
        for bucket in self._changed(tensors, before, found):
            file = next(files)
            written_whole(self.folder / file, partial(save_file, bucket))
            for name in bucket:
                found[name] = Stored(file, found[name].digest, found[name].nbytes)
        self._stored = found  # only now: after a failure all are written again
        return found

    def _changed(
        self, tensors: Iterable[tuple[str, Tensor | None]], before: dict[str, Stored], found: dict[str, Stored]
    ) -> Iterator[dict[str, Tensor]]:
        """The tensors that changed, on the CPU, some at a time; all are noted in `found`."""
        bucket: dict[str, Tensor] = {}
        used = 0
        for name, tensor in tensors:
            if tensor is None:
                continue
            # A copy: tensors may be views of one parameter, which safetensors does not write.
            held = tensor.to("cpu", copy=True).contiguous()
            known, found[name] = before.get(name), Stored("", digest(held), held.nbytes)
            if known is not None and known.digest == found[name].digest:
                found[name] = known
                continue
            if bucket and used + held.nbytes > self.bucket_bytes:
                yield bucket
                bucket, used = {}, 0
            bucket[name] = held
            used += held.nbytes
        if bucket:
            yield bucket


_writer: FileWriter | None = None
"""This process's writer: a process is one policy rank."""


def connect_writer(_rank: PolicyRank, folder: Path, bucket_bytes: int) -> None:
    """Begin to write into a folder, which exists; nothing of it is known to be there."""
    global _writer
    _writer = FileWriter(folder, bucket_bytes)


def write_weights(rank: PolicyRank, part: str, whole: bool) -> dict[str, Stored]:
    """Write this stage's weights, gathered over its ranks (`FileWriter.write`)."""
    from torch.distributed import get_rank

    assert _writer is not None, "connect_writer() comes first"
    tensors = iter_hf_tensors(rank.whole_chunks(), rank.shape, _writer.bucket_bytes)
    try:
        return _writer.write(tensors, part, get_rank(), whole=whole)
    finally:
        # Gathering is collective: every rank goes through to the end, also one that cannot write.
        for _ in tensors:
            pass
