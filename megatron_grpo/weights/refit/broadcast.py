"""Refit by broadcast, with a group of one sender and all workers for each pipeline stage: `send_tensors` runs on ranks
of the policy, `BroadcastTransport` on the driver, `BroadcastReceiver` in an engine's worker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
from torch import Tensor
from torch.distributed import Store, Work

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.platform.device import current_platform
from megatron_grpo.weights.hf_weights import gathered, hf_specs
from megatron_grpo.weights.refit.buckets import BUFFERS, Bucket, Channel, plan_buckets
from megatron_grpo.weights.refit.engine_layers import TensorwiseLoading
from megatron_grpo.weights.refit.groups import Rendezvous, join
from megatron_grpo.weights.refit.transport import GroupTransport, SentCounts

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


def write_plan(store: Store, stage: int, specs: Sequence[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> None:
    """Write what a stage sends, as `plan_buckets` takes it; both sides compute the same buckets from that."""
    store.set(f"plan/{stage}", json.dumps([specs, bucket_bytes]))


class StageLinks(Channel):
    """The groups of one sender and all workers, a group for each pipeline stage; buckets go round robin over stages.

    Args:
        rendezvous: address and size of the groups.
        plans: buckets by stage: those of one on its sender, those of all on a worker.
        member: 0 on a sender, and 1 + number of a worker.
        device: device of the buffers.
    """

    def __init__(
        self, rendezvous: Rendezvous, plans: Mapping[int, Sequence[Bucket]], member: int, device: torch.device
    ) -> None:
        size = rendezvous.receivers + 1
        self._groups = {stage: join(rendezvous, f"stage {stage}", member, size, device) for stage in plans}
        self._sends = member == 0
        self._order = [
            (stage, number, bucket)
            for number, row in enumerate(zip_longest(*plans.values()))
            for stage, bucket in zip(plans, row, strict=True)
            if bucket is not None
        ]
        self.buckets = [bucket for _, _, bucket in self._order]
        self.sizes = [bucket.nbytes for bucket in self.buckets]
        self.depth = max(len(plans), BUFFERS)
        self._buffers = torch.empty(self.depth, max(self.sizes), dtype=torch.uint8, device=device)

    def buffer(self, number: int) -> Tensor:
        return self._buffers[number % self.depth, : self.sizes[number]]

    def begin(self, number: int) -> list[Work]:
        if not self._groups:
            which = (
                "group of this rank failed before and was"
                if self._sends
                else "groups of this worker failed before and were"
            )
            raise RuntimeError(f"the {which} not made anew")
        return [self._groups[self._order[number][0]].broadcast(self.buffer(number), root=0)]

    def broken(self, number: int, problem: str) -> str:
        stage, bucket, slots = self._order[number]
        return f"stage {stage}, bucket {bucket}: {problem}; it begins with {slots.slots[0].name}"

    def gone(self, number: int) -> str:
        stage, count, bucket = self._order[number]
        first = bucket.slots[0].name
        if self._sends:
            return f"stage {stage}, bucket {count}, which begins with {first}: receivers are gone"
        return f"stage {stage} stopped sending before {first}"

    def close(self) -> None:
        self._groups.clear()


def send_tensors(links: StageLinks, tensors: Iterable[tuple[str, Tensor | None]], version: int) -> SentCounts:
    """Send one version of a stage's weights.

    Args:
        links: of the stage's sender.
        tensors: (name, full tensor [...] in the dtype of the plan), in the order of the plan.
        version: number of the weights.

    Raises:
        RuntimeError: the receivers stopped receiving, or the group failed before.
    """
    source = iter(tensors)

    def fill(number: int, buffer: Tensor) -> None:
        for slot in links.buckets[number].slots:
            name, tensor = next(source)
            assert name == slot.name, f"planned {slot.name}, got {name}"
            assert tensor is not None, "tensors are whole on the rank that sends"
            slot.view(buffer).copy_(tensor)

    links.send(fill, version)
    assert next(source, None) is None, "more tensors than planned"
    return sum(links.sizes), sum(len(bucket.slots) for bucket in links.buckets), len(links.sizes)


_links: StageLinks | None = None
"""The links of this process, which is one rank of the policy; None on ranks that do not send."""


def connect_sender(rank: PolicyRank, rendezvous: Rendezvous, bucket_bytes: int) -> None:
    """Join the group of this rank's stage if this rank sends; returns when every receiver has joined."""
    global _links
    _links = None
    # Imported here because the driver imports this module too, and does not need Megatron.
    from megatron.core import parallel_state

    # Whole tensors are gathered on the first rank of each pipeline stage.
    if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_data_parallel_rank(
        with_context_parallel=True
    ):
        return
    stage = parallel_state.get_pipeline_model_parallel_rank()
    specs = hf_specs(rank.chunks, rank.shape)
    write_plan(rendezvous.store(), stage, specs, bucket_bytes)
    _links = StageLinks(rendezvous, {stage: plan_buckets(specs, bucket_bytes)}, 0, current_platform().device)


def send_weights(rank: PolicyRank, version: int, bucket_bytes: int) -> SentCounts | None:
    """Send this stage's weights, gathered over its ranks; None on ranks that do not send."""
    with gathered(rank, bucket_bytes) as tensors:
        return send_tensors(_links, tensors, version) if _links is not None else None


class BroadcastTransport(GroupTransport):
    """Every worker receives whole tensors and keeps its shard, whatever the two layouts are."""

    mode: ClassVar[RefitMode] = "broadcast"

    def _connect_senders(self, store: Store, rendezvous: Rendezvous) -> list[ray.ObjectRef]:
        store.set("stages", str(self._policy.settings.config.parallel.pipeline))
        return self._policy.submit(connect_sender, rendezvous, self._bucket_bytes)

    def _send(self, version: int) -> list[ray.ObjectRef]:
        return self._policy.submit(send_weights, version, self._bucket_bytes)


class BroadcastReceiver:
    """A worker's end of the groups of all stages.

    Args:
        worker: vLLM's, with a model.
        rendezvous: address and size of the groups.
        number: the worker's, counted over all engines.
    """

    def __init__(self, worker: Any, rendezvous: Rendezvous, number: int) -> None:
        self._model = worker.model_runner.get_model()
        self._loading = TensorwiseLoading(self._model, worker.vllm_config.model_config.dtype)
        self.abandon = self._loading.abandon
        store = rendezvous.store()
        # Waits until the senders have written their plans.
        written = (store.get(f"plan/{stage}") for stage in range(int(store.get("stages"))))
        plans = {stage: plan_buckets(*json.loads(plan)) for stage, plan in enumerate(written)}
        self._links = StageLinks(rendezvous, plans, 1 + number, worker.device)

    def receive(self, version: int) -> None:
        """Load every bucket whose checksum is intact, and let vLLM compute with them.

        Raises:
            ValueError: a checksum was broken.
            RuntimeError: a stage stopped sending, or the groups failed before.
        """
        self._loading.begin()
        self._links.receive(self._load, version)
        self._loading.finish()

    def _load(self, number: int, buffer: Tensor) -> None:
        self._model.load_weights((slot.name, slot.view(buffer)) for slot in self._links.buckets[number].slots)
