"""Runs on a rank of the policy: writes the changed tensors of a version into the folder that engines read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import get_rank

from megatron_grpo.models.hf_folder import save_tensors
from megatron_grpo.models.hf_weights import iter_adapter_tensors, iter_hf_tensors
from megatron_grpo.observability.run_files import write_atomically
from megatron_grpo.weight_sync.weights_folder import WrittenTensor, compute_digest

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


@dataclass(slots=True)
class FileWriter:
    """Writes the tensors of one stage that have changed since the last version."""

    folder: Path
    bucket_bytes: int
    """Size of a file and of the copy in memory; a single larger tensor exceeds it."""
    _written: dict[str, WrittenTensor] = field(default_factory=dict)

    def write(
        self, tensors: Iterable[tuple[str, Tensor | None]], part: str, rank: int, *, rewrite: bool
    ) -> dict[str, WrittenTensor]:
        """Write one version of the stage's weights; return every tensor's file.

        `tensors` are (name, full tensor [...]), or (name, None) on ranks that do not write. `part` is the subfolder of
        this version. With `rewrite`, unchanged tensors are written, too.
        """
        previous, self._written = ({} if rewrite else self._written), {}
        (self.folder / part).mkdir(exist_ok=True)
        written: dict[str, WrittenTensor] = {}
        bucket: dict[str, Tensor] = {}
        files = (f"{part}/rank-{rank}-{number:04d}.safetensors" for number in count())
        file = next(files)
        for name, tensor in tensors:
            if tensor is None:
                continue
            # A copy: tensors may be views of one parameter, which safetensors does not write.
            copy = tensor.to("cpu", copy=True).contiguous()
            stored, digest = previous.get(name), compute_digest(copy)
            if stored is not None and stored.digest == digest:
                written[name] = stored
                continue
            if bucket and sum(values.nbytes for values in bucket.values()) + copy.nbytes > self.bucket_bytes:
                write_atomically(self.folder / file, partial(save_tensors, bucket))
                bucket, file = {}, next(files)
            bucket[name] = copy
            written[name] = WrittenTensor(file, digest, copy.nbytes)
        if bucket:
            write_atomically(self.folder / file, partial(save_tensors, bucket))
        self._written = written  # only at the end, so that after a failure all tensors are written again
        return written


def connect_folder(rank: PolicyRank, folder: Path, bucket_bytes: int) -> None:
    rank.weight_sender = FileWriter(folder, bucket_bytes)


def send_files(rank: PolicyRank, part: str, rewrite: bool, adapters_alone: bool = False) -> dict[str, WrittenTensor]:
    """Write this stage's weights, gathered over its ranks (`FileWriter.write`)."""
    assert isinstance(rank.weight_sender, FileWriter), "connect_folder() comes first"
    chunks, shape = rank.gather_chunks(), rank.shape
    tensors = iter_adapter_tensors(chunks, shape, Tensor.detach) if adapters_alone else iter_hf_tensors(chunks, shape)
    try:
        return rank.weight_sender.write(tensors, part, get_rank(), rewrite=rewrite)
    finally:
        for _ in tensors:  # gathering is collective: a rank that cannot write takes part to the end
            pass
