"""The policy's half of a refit: functions that run on every policy rank; one rank of each pipeline stage sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work

from megatron_grpo.models.hf_weights import hf_specs, iter_hf_tensors
from megatron_grpo.platform.device import current_platform
from megatron_grpo.refit.broadcast.channel import join_stage, write_plan
from megatron_grpo.refit.buckets import Bucket, plan_buckets, seal
from megatron_grpo.refit.groups import Group, Rendezvous, left_on_failure
from megatron_grpo.refit.interface import Sent

if TYPE_CHECKING:
    from megatron_grpo.policy.rank.policy_rank import PolicyRank


@dataclass(slots=True)
class BucketSender:
    """The sending end of one pipeline stage's group."""

    stage: int
    buckets: list[Bucket]
    group: Group | None
    """None: a send has failed, and whoever waited for it was told by the end of the group."""
    device: torch.device
    buffers: Tensor = field(init=False)
    """[2, largest bucket], uint8: one is filled while the other one is under way."""

    def __post_init__(self) -> None:
        largest = max(bucket.nbytes for bucket in self.buckets)
        self.buffers = torch.empty(2, largest, dtype=torch.uint8, device=self.device)

    def send(self, tensors: Iterable[tuple[str, Tensor | None]], version: int) -> Sent:
        """Send one version of the stage's weights.

        Args:
            tensors: (name, full tensor [...] in the dtype of the plan), in the order of the plan; None in place of the
                tensor on ranks that do not send.
            version: number of the weights, which the buckets are sealed with.

        Raises:
            RuntimeError: the receivers stopped receiving, or the group failed before.
        """
        with left_on_failure(self.close):
            self._send(tensors, version)
        return Sent(
            sum(bucket.nbytes for bucket in self.buckets),
            sum(len(bucket.slots) for bucket in self.buckets),
            len(self.buckets),
        )

    def close(self) -> None:
        """Leave the group: receivers that wait for this rank are told at once."""
        self.group = None

    def _send(self, tensors: Iterable[tuple[str, Tensor | None]], version: int) -> None:
        if self.group is None:
            raise RuntimeError("the group of this rank failed before and was not made anew")
        source = iter(tensors)
        under_way: list[tuple[int, Work]] = []
        for number, bucket in enumerate(self.buckets):
            if len(under_way) == len(self.buffers):
                self._wait(*under_way.pop(0))
            buffer = self.buffers[number % len(self.buffers), : bucket.nbytes]
            for slot in bucket.slots:
                name, tensor = next(source)
                assert name == slot.name, f"planned {slot.name}, got {name}"
                assert tensor is not None, "tensors are whole on the rank that sends"
                slot.view(buffer).copy_(tensor)
            seal(buffer, version)
            under_way.append((number, self.group.broadcast(buffer, root=0)))
        for one in under_way:
            self._wait(*one)
        assert next(source, None) is None, "more tensors than planned"

    def _wait(self, number: int, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            which = f"stage {self.stage}, bucket {number}, which begins with {self.buckets[number].slots[0].name}"
            raise RuntimeError(f"{which}: receivers are gone: {error}") from error


_sender: BucketSender | None = None
"""This process's end of its group: a process is one policy rank."""


def connect_sender(rank: PolicyRank, rendezvous: Rendezvous, bucket_bytes: int) -> None:
    """Open the group of this rank's stage, if this is the rank that sends; returns when every receiver has joined."""
    global _sender
    _sender = None
    place = _place()
    if not place.sends:
        return
    specs = hf_specs(rank.chunks, rank.shape)
    buckets = plan_buckets(((spec.name, spec.dtype, spec.shape) for spec in specs), bucket_bytes)
    device = current_platform().device
    write_plan(rendezvous.store(), place.stage, place.stages, buckets, bucket_bytes)
    _sender = BucketSender(place.stage, buckets, join_stage(rendezvous, place.stage, 0, device), device)


def send_weights(rank: PolicyRank, version: int, bucket_bytes: int) -> Sent | None:
    """Send this stage's weights, gathered over its ranks; what was sent, on the rank that sends."""
    tensors = iter_hf_tensors(rank.whole_chunks(), rank.shape, bucket_bytes)
    try:
        return _sender.send(tensors, version) if _sender is not None else None
    finally:
        # Gathering is collective: every rank goes through to the end, the sender also when its receivers are gone.
        for _ in tensors:
            pass


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank of the policy stands among those that send."""

    stage: int
    stages: int
    sends: bool
    """Whether the rank is the first of its stage, which is given the whole tensors."""


def _place() -> _Place:
    # Imported here because the driver imports this module too, and has no use for Megatron.
    from megatron.core import parallel_state

    return _Place(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
        sends=parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
    )
