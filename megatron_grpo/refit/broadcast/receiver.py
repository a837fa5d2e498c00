"""The generation worker's half of a refit: receive buckets, verify them, load them into vLLM's model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_grpo.cluster.phases import phase
from megatron_grpo.refit.broadcast.channel import Group, Rendezvous, join, read_plans
from megatron_grpo.refit.buckets import Bucket, broken_seal

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object  # vLLM mixes RefitWorker into whichever worker class it runs


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """Where to meet, and this engine's place among the receivers."""

    rendezvous: Rendezvous
    first_receiver: int
    """Receivers of the engines before this one."""


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    """One refit."""

    version: int


class BucketReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """Registered with vLLM by the plugin; lives in every worker process."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._groups: list[Group] = []
        self._plans: list[list[Bucket]] = []

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Join the group of every stage and read what its sender is going to send."""
        self.shutdown()
        rendezvous = init_info.rendezvous
        rank = 1 + init_info.first_receiver + self.parallel_config.rank
        self._plans = read_plans(rendezvous.store())
        self._groups = [join(rendezvous, stage, rank, self.device) for stage in range(len(self._plans))]

    def start_weight_update(self) -> None:
        """Prepare vLLM's layers to be loaded again."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            self._forget_packed_experts()

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Load every bucket whose seal is intact.

        Raises:
            ValueError: a seal was broken. Raised after the last bucket, so that senders and other workers are not kept
                waiting and the groups stay usable.
        """
        broken: list[str] = []
        for stage, number, bucket in self._order():
            buffer = self._receive(stage, bucket)
            problem = broken_seal(buffer, update_info.version)
            if problem is not None:
                broken.append(f"stage {stage}, bucket {number}: {problem}")
            if not broken:
                self.model.load_weights((slot.name, slot.view(buffer)) for slot in bucket.slots)
        if broken:
            raise ValueError("; ".join(broken))

    def finish_weight_update(self) -> None:
        """Let vLLM process what was loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied_heads()

    def _forget_packed_experts(self) -> None:
        # On CPU experts too are multiplied by packed copies. vLLM packs what it loads only where it makes a layer's
        # kernel, and takes a kernel that is there for one whose weights need no packing.
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _repack_tied_heads(self) -> None:
        # On CPU every layer multiplies by a packed copy of its weight, made when the layer is loaded; a head that is
        # tied to the embedding is never loaded itself.
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the groups."""
        self._groups, self._plans = [], []

    def _order(self) -> Iterator[tuple[int, int, Bucket]]:
        """(stage, number, bucket), the stages in turn so that their senders pack simultaneously."""
        for number, row in enumerate(zip_longest(*self._plans)):
            yield from ((stage, number, bucket) for stage, bucket in enumerate(row) if bucket is not None)

    def _receive(self, stage: int, bucket: Bucket) -> Tensor:
        """[bucket.nbytes], uint8, on the worker's device: the next bucket of a pipeline stage."""
        # A new buffer each time: vLLM keeps views of it until the layer that they belong to is complete.
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
        try:
            self._groups[stage].broadcast(buffer, root=0).wait()
        except RuntimeError as error:
            raise RuntimeError(f"stage {stage} stopped sending: {error}") from error
        return buffer


class RefitWorker(Worker):
    """Methods that vLLM adds to its worker class (`worker_extension_cls`).

    They return what went wrong and raise nothing: of several failing workers vLLM's executor reads only the first
    answer, and takes the second for the answer to the next call.
    """

    @phase("connect the refit")
    def connect_refit(self, rendezvous: dict[str, Any], first_receiver: int) -> str | None:
        """Join the groups of all stages. A Rendezvous travels as a dict: vLLM's messages carry plain types only."""
        try:
            self.init_weight_transfer_engine({"rendezvous": Rendezvous(**rendezvous), "first_receiver": first_receiver})
        except Exception as error:  # noqa: BLE001 - see the class
            return self._described(error)
        return None

    @phase("receive weights")
    def receive_refit(self, version: int) -> str | None:
        """Receive one version in one call."""
        try:
            self.start_weight_update()
            self.update_weights({"version": version})
            self.finish_weight_update()
        except Exception as error:  # noqa: BLE001 - see the class
            # Half-loaded layers must not keep tensors of this version for the next attempt.
            self.weight_transfer_engine.finish_weight_update()
            return self._described(error)
        return None

    def _described(self, error: Exception) -> str:
        return f"worker {self.rank}: {error or type(error).__name__}"
