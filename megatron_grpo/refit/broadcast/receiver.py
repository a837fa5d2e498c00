"""The generation worker's half of a broadcast: receive buckets, verify them, load them into vLLM's model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.refit.broadcast.channel import join_stage, read_plans
from megatron_grpo.refit.buckets import Bucket, broken_seal
from megatron_grpo.refit.groups import Rendezvous
from megatron_grpo.refit.vllm_layers import forget_packed_experts, repack_tied_heads


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
        self._vllm_config, self._device = vllm_config, device
        self._plans = read_plans(rendezvous.store())
        self._groups = [join_stage(rendezvous, stage, 1 + number, device) for stage in range(len(self._plans))]

    def begin(self) -> None:
        """Prepare vLLM's layers to be loaded again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)
        if self._device.type == "cpu":
            forget_packed_experts(self._model)

    def receive(self, version: int) -> None:
        """Load every bucket whose seal is intact.

        Raises:
            ValueError: a seal was broken. Raised after the last bucket, so that senders and other workers are not kept
                waiting and the groups stay usable.
            RuntimeError: a stage stopped sending.
        """
        broken: list[str] = []
        for stage, number, bucket in self._order():
            buffer = self._receive(stage, bucket)
            problem = broken_seal(buffer, version)
            if problem is not None:
                broken.append(f"stage {stage}, bucket {number}: {problem}; it begins with {bucket.slots[0].name}")
            if not broken:
                self._model.load_weights((slot.name, slot.view(buffer)) for slot in bucket.slots)
        if broken:
            raise ValueError("; ".join(broken))

    def finish(self) -> None:
        """Let vLLM process what was loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._vllm_config.model_config)
        if self._device.type == "cpu":
            repack_tied_heads(self._model)

    def abandon(self) -> None:
        """Let half-loaded layers forget their tensors, which the next attempt must not find."""
        self.finish()

    def _order(self) -> Iterator[tuple[int, int, Bucket]]:
        """(stage, number, bucket), the stages in turn so that their senders pack simultaneously."""
        for number, row in enumerate(zip_longest(*self._plans)):
            yield from ((stage, number, bucket) for stage, bucket in enumerate(row) if bucket is not None)

    def _receive(self, stage: int, bucket: Bucket) -> Tensor:
        """[bucket.nbytes], uint8, on the worker's device: the next bucket of a pipeline stage."""
        # A new buffer each time: vLLM keeps views of it until the layer that they belong to is complete.
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
        try:
            self._groups[stage].broadcast(buffer, root=0).wait()
        except RuntimeError as error:
            raise RuntimeError(f"stage {stage} stopped sending before {bucket.slots[0].name}: {error}") from error
        return buffer
