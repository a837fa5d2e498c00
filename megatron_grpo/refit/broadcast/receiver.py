"""The generation worker's half of a broadcast: receive buckets, verify them, load them into vLLM's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from megatron_grpo.refit.broadcast.channel import join_stage, read_plans
from megatron_grpo.refit.broadcast.loading import TensorwiseLoading
from megatron_grpo.refit.buckets import Bucket, broken_seal
from megatron_grpo.refit.groups import Rendezvous, left_on_failure


class BroadcastReceiver:
    """One worker's membership of the groups of all stages.

    Args:
        model: vLLM's model.
        vllm_config: vLLM's settings of the engine.
        device: where the model is.
        rendezvous: where to meet.
        number: the worker's among those of all engines.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, device: torch.device, rendezvous: Rendezvous, number: int
    ) -> None:
        self._model: Any = model
        self._loading = TensorwiseLoading(model, vllm_config.model_config.dtype)
        plans = read_plans(rendezvous.store())
        self._groups = [join_stage(rendezvous, stage, 1 + number, device) for stage in range(len(plans))]
        self._order = list(_in_turn(plans))
        largest = max(bucket.nbytes for _, _, bucket in self._order)
        self._buffers = torch.empty(max(len(plans), 2), largest, dtype=torch.uint8, device=device)
        """So many that every stage has a bucket under way, and while one is loaded another one."""

    def begin(self) -> None:
        """Prepare vLLM's layers to be loaded again."""
        self._loading.begin()

    def receive(self, version: int) -> None:
        """Load every bucket whose seal is intact.

        Raises:
            ValueError: a seal was broken. Raised after the last bucket, so that senders and other workers are not kept
                waiting and the groups stay usable.
            RuntimeError: a stage stopped sending, or the groups failed before.
        """
        with left_on_failure(self._groups.clear):
            broken = self._receive(version)
        if broken:
            raise ValueError("; ".join(broken))

    def _receive(self, version: int) -> list[str]:
        """Load every bucket up to the first whose seal is broken; what is wrong with those that are."""
        if not self._groups:
            raise RuntimeError("the groups of this worker failed before and were not made anew")
        ahead = len(self._buffers)
        under_way = {position: self._begin(position) for position in range(min(ahead, len(self._order)))}
        broken: list[str] = []
        for position, (stage, number, bucket) in enumerate(self._order):
            try:
                under_way.pop(position).wait()
            except RuntimeError as error:
                raise RuntimeError(f"stage {stage} stopped sending before {bucket.slots[0].name}: {error}") from error
            buffer = self._buffer(position)
            problem = broken_seal(buffer, version)
            if problem is not None:
                broken.append(f"stage {stage}, bucket {number}: {problem}; it begins with {bucket.slots[0].name}")
            if not broken:
                self._model.load_weights((slot.name, slot.view(buffer)) for slot in bucket.slots)
            if position + ahead < len(self._order):  # into the buffer that has just been emptied
                under_way[position + ahead] = self._begin(position + ahead)
        return broken

    def finish(self) -> None:
        """Let vLLM compute with what was loaded."""
        self._loading.finish()

    def abandon(self) -> None:
        """Let half-loaded layers forget what came, which the next attempt must not find."""
        self._loading.abandon()

    def _begin(self, position: int) -> Work:
        """Begin to receive the bucket at a position of the order."""
        stage, _, _ = self._order[position]
        return self._groups[stage].broadcast(self._buffer(position), root=0)

    def _buffer(self, position: int) -> Tensor:
        """[Bucket.nbytes], uint8, on the worker's device: where the bucket at a position of the order goes."""
        _, _, bucket = self._order[position]
        return self._buffers[position % len(self._buffers), : bucket.nbytes]


def _in_turn(plans: Sequence[Sequence[Bucket]]) -> Iterator[tuple[int, int, Bucket]]:
    """(stage, number, bucket), the stages in turn so that all of them send at once.

    Args:
        plans: buckets of each stage.
    """
    for number, row in enumerate(zip_longest(*plans)):
        yield from ((stage, number, bucket) for stage, bucket in enumerate(row) if bucket is not None)
