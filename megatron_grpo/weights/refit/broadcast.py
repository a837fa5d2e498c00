"""Refit by broadcast, with a group of one sender and all workers for each pipeline stage: `BucketSender` runs on ranks
of the policy, `BroadcastTransport` on the driver, `BroadcastReceiver` in an engine's worker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
from torch import Tensor
from torch.distributed import Store, Work

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.platform.device import current_platform
from megatron_grpo.weights.hf_weights import hf_specs, iter_hf_tensors
from megatron_grpo.weights.refit.buckets import Bucket, checksum_problem, plan_buckets, write_checksum
from megatron_grpo.weights.refit.engine_layers import TensorwiseLoading
from megatron_grpo.weights.refit.groups import Group, Rendezvous, join, leave_on_failure
from megatron_grpo.weights.refit.transport import GroupTransport, SentCounts

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


def write_plan(store: Store, stage: int, stages: int, buckets: list[Bucket], bucket_bytes: int) -> None:
    """Write the names, types and shapes that a stage sends; both sides compute the same buckets from them."""
    slots = [slot for bucket in buckets for slot in bucket.slots]
    tensors = [(slot.name, str(slot.dtype).removeprefix("torch."), slot.shape) for slot in slots]
    store.set(f"plan/{stage}", json.dumps({"bucket_bytes": bucket_bytes, "tensors": tensors}))
    store.set("stages", str(stages))


def read_plans(store: Store) -> list[list[Bucket]]:
    """The buckets of every stage, by stage; waits until their senders have written the plan."""
    plans = [json.loads(store.get(f"plan/{stage}")) for stage in range(int(store.get("stages")))]
    return [plan_buckets(plan["tensors"], plan["bucket_bytes"]) for plan in plans]


def join_stage(rendezvous: Rendezvous, stage: int, rank: int, device: torch.device) -> Group:
    """Join the group of one stage; returns when its sender, rank 0, and all receivers have joined.

    Raises:
        RuntimeError: a member did not join within the timeout.
    """
    return join(rendezvous, f"stage {stage}", rank, rendezvous.receivers + 1, device)


@dataclass(slots=True)
class BucketSender:
    """The sending end of one pipeline stage's group."""

    stage: int
    buckets: list[Bucket]
    group: Group | None
    """None after a failed send: the receivers fail with the end of the group."""
    device: torch.device
    buffers: Tensor = field(init=False)
    """[2, largest bucket], uint8: one is filled while the other one is being sent."""

    def __post_init__(self) -> None:
        largest = max(bucket.nbytes for bucket in self.buckets)
        self.buffers = torch.empty(2, largest, dtype=torch.uint8, device=self.device)

    def send(self, tensors: Iterable[tuple[str, Tensor | None]], version: int) -> SentCounts:
        """Send one version of the stage's weights.

        Args:
            tensors: (name, full tensor [...] in the dtype of the plan), in the order of the plan; None in place of the
                tensor on ranks that do not send.
            version: number of the weights, written behind each bucket.

        Raises:
            RuntimeError: the receivers stopped receiving, or the group failed before.
        """
        with leave_on_failure(self.close):
            self._send(tensors, version)
        return SentCounts(
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
            write_checksum(buffer, version)
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
"""The sender of this process, which is one rank of the policy; None on ranks that do not send."""


def connect_sender(rank: PolicyRank, rendezvous: Rendezvous, bucket_bytes: int) -> None:
    """Join the group of this rank's stage if this rank sends; returns when every receiver has joined."""
    global _sender
    _sender = None
    # Imported here because the driver imports this module too, and does not need Megatron.
    from megatron.core import parallel_state

    # Whole tensors are gathered on the first rank of each pipeline stage.
    if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_data_parallel_rank(
        with_context_parallel=True
    ):
        return
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    specs = hf_specs(rank.chunks, rank.shape)
    buckets = plan_buckets(((spec.name, spec.dtype, spec.shape) for spec in specs), bucket_bytes)
    device = current_platform().device
    write_plan(rendezvous.store(), stage, stages, buckets, bucket_bytes)
    _sender = BucketSender(stage, buckets, join_stage(rendezvous, stage, 0, device), device)


def send_weights(rank: PolicyRank, version: int, bucket_bytes: int) -> SentCounts | None:
    """Send this stage's weights, gathered over its ranks; None on ranks that do not send."""
    tensors = iter_hf_tensors(rank.whole_chunks(), rank.shape, bucket_bytes)
    try:
        return _sender.send(tensors, version) if _sender is not None else None
    finally:
        # Gathering is collective: every rank iterates to the end, the sender also when its receivers are gone.
        for _ in tensors:
            pass


class BroadcastTransport(GroupTransport):
    """Every worker receives whole tensors and keeps its shard, whatever the two layouts are."""

    mode: ClassVar[RefitMode] = "broadcast"

    def _connect_senders(self, store: Store, rendezvous: Rendezvous) -> list[ray.ObjectRef]:
        return self._policy.submit(connect_sender, rendezvous, self._bucket_bytes)

    def _send(self, version: int) -> list[ray.ObjectRef]:
        return self._policy.submit(send_weights, version, self._bucket_bytes)


class BroadcastReceiver:
    """A worker's end of the groups of all stages.

    Args:
        model: vLLM's model.
        vllm_config: vLLM's settings of the engine.
        device: where the model is.
        rendezvous: address and size of the groups.
        number: the worker's, counted over all engines.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, device: torch.device, rendezvous: Rendezvous, number: int
    ) -> None:
        self._model: Any = model
        self._loading = TensorwiseLoading(model, vllm_config.model_config.dtype)
        plans = read_plans(rendezvous.store())
        self._groups = [join_stage(rendezvous, stage, 1 + number, device) for stage in range(len(plans))]
        self._order = list(_interleaved(plans))
        largest = max(bucket.nbytes for _, _, bucket in self._order)
        self._buffers = torch.empty(max(len(plans), 2), largest, dtype=torch.uint8, device=device)
        """At least one for each stage, and two so that a bucket arrives while another one is loaded."""

    def begin(self) -> None:
        """Prepare vLLM's layers to be loaded again."""
        self._loading.begin()

    def receive(self, version: int) -> None:
        """Load every bucket whose checksum is intact.

        Raises:
            ValueError: a checksum was broken. Raised after the last bucket, so that senders and other workers are not
            kept
                waiting and the groups stay usable.
            RuntimeError: a stage stopped sending, or the groups failed before.
        """
        with leave_on_failure(self._groups.clear):
            broken = self._receive(version)
        if broken:
            raise ValueError("; ".join(broken))

    def _receive(self, version: int) -> list[str]:
        """Load every bucket up to the first with a wrong checksum; the problems found."""
        if not self._groups:
            raise RuntimeError("the groups of this worker failed before and were not made anew")
        prefetch = len(self._buffers)
        under_way = {position: self._begin(position) for position in range(min(prefetch, len(self._order)))}
        broken: list[str] = []
        for position, (stage, number, bucket) in enumerate(self._order):
            try:
                under_way.pop(position).wait()
            except RuntimeError as error:
                raise RuntimeError(f"stage {stage} stopped sending before {bucket.slots[0].name}: {error}") from error
            buffer = self._buffer(position)
            problem = checksum_problem(buffer, version)
            if problem is not None:
                broken.append(f"stage {stage}, bucket {number}: {problem}; it begins with {bucket.slots[0].name}")
            if not broken:
                self._model.load_weights((slot.name, slot.view(buffer)) for slot in bucket.slots)
            if position + prefetch < len(self._order):  # into the buffer that is free now
                under_way[position + prefetch] = self._begin(position + prefetch)
        return broken

    def finish(self) -> None:
        """Let vLLM compute with what was loaded."""
        self._loading.finish()

    def abandon(self) -> None:
        """Restore the previous weights of incomplete layers."""
        self._loading.abandon()

    def _begin(self, position: int) -> Work:
        """Start receiving the bucket at a position of the order."""
        stage, _, _ = self._order[position]
        return self._groups[stage].broadcast(self._buffer(position), root=0)

    def _buffer(self, position: int) -> Tensor:
        """[Bucket.nbytes], uint8, on the worker's device: the buffer of the bucket at a position of the order."""
        _, _, bucket = self._order[position]
        return self._buffers[position % len(self._buffers), : bucket.nbytes]


def _interleaved(plans: Sequence[Sequence[Bucket]]) -> Iterator[tuple[int, int, Bucket]]:
    """(stage, number, bucket), round robin over the stages, so that all of them send at once.

    Args:
        plans: buckets of each stage.
    """
    for number, row in enumerate(zip_longest(*plans)):
        yield from ((stage, number, bucket) for stage, bucket in enumerate(row) if bucket is not None)
