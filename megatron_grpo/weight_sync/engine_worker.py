"""Runs in an engine's worker: the receiving half of a refit.

Every worker of every engine imports this module, so it and all that it needs import as few others as possible.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context

from megatron_grpo.cluster.phases import phase
from megatron_grpo.weight_sync import placeholder_loader  # noqa: F401  # vLLM's load format "megatron_grpo"
from megatron_grpo.weight_sync.boxes import Box, compute_digest, pack_boxes, unpack_boxes

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    from megatron_grpo.config.generation_schema import RefitMode
    from megatron_grpo.generation.engine_interface import EngineWorker, LoaderTrace, TensorShapes
    from megatron_grpo.weight_sync.fingerprints import Fingerprint

    class Worker(VllmWorker, EngineWorker): ...
else:
    Worker = object  # vLLM mixes RefitWorker into whichever worker class it runs

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """A worker's end of a connected refit."""

    def receive(self, version: int) -> None:
        """Receive one version, and load it into the model.

        Raises:
            ValueError, RuntimeError: the version is damaged or incomplete; after `abandon` a later refit is possible.
        """

    def abandon(self) -> None:
        """Restore the previous weights of incomplete layers."""


def make_receiver(worker: Any, mode: RefitMode, boxes: Sequence[Box], source: dict[str, Any], number: int) -> Receiver:
    """Make the receiver of a mode, importing only its module."""
    if mode == "files":
        from megatron_grpo.weight_sync.weights_folder import FileReceiver

        return FileReceiver(worker, source)
    from megatron_grpo.weight_sync.shard_receiver import ShardReceiver, TensorReceiver

    if mode == "broadcast" or "adapter" in source:
        return TensorReceiver(worker, source, number)
    return ShardReceiver(worker, boxes, source, number)


class RefitWorker(Worker):
    """Methods that vLLM adds to its worker class (`worker_extension_cls`).

    Engines call them through vLLM, by the names in `EngineWorker` (`VllmEngine._call_workers`). They return an error's
    text and never raise: when several workers raise, vLLM's executor reads only the first response, and takes the
    second one for the response to its next call.
    """

    received: int | None = None
    """The complete version that this worker holds; None before the first refit and after a failed one."""
    # Once the refit is connected:
    receiver: Receiver | None = None
    boxes: Sequence[Box] = ()
    unsent_copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """While the engine sleeps without weights: tensors that no refit fills, and their copies in host memory."""

    @phase("trace loaders")
    def trace_weights(self, mode: RefitMode, tensors: TensorShapes, needs_boxes: bool) -> LoaderTrace | str:
        """Trace the model's loaders; `needs_boxes`: return the boxes too."""
        from megatron_grpo.weight_sync.engine_adapters import base_layers
        from megatron_grpo.weight_sync.engine_layers import has_converted_layers
        from megatron_grpo.weight_sync.weight_trace import trace_model

        try:
            config, model = self.vllm_config, self.model_runner.get_model()
            with set_current_vllm_config(config), base_layers(model):
                trace = trace_model(model, tensors, config.model_config.dtype)
            if trace.unexplained:  # other modes use boxes for the comparison of weights only
                text = f"parameters whose loading is no copy of boxes: {trace.describe_unexplained()}"
                if mode == "reshard":
                    raise ValueError(f"refit.mode=reshard cannot fill {text}; use broadcast")
                logger.warning("weights are not compared with the policy's in %s", text)
            packed, converts = pack_boxes(trace.boxes), has_converted_layers(model)
        except Exception as error:  # noqa: BLE001 - see the class
            return self._describe_failure(error)
        boxes = packed if needs_boxes else ""
        return {"digest": compute_digest(packed), "boxes": boxes, "converts": converts}

    @phase("connect the refit")
    def connect_refit(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> str | None:
        """Connect to the policy.

        `source`: shapes of the model's `tensors`, by name, `boxes` of the engine's ranks, and the address that the
        mode's receiver needs, in types that vLLM's messages carry.
        `first_receiver`: total number of workers of the engines before this one.
        """
        self.receiver = None
        try:
            rank = self.parallel_config.rank
            self.boxes = unpack_boxes(source["boxes"][rank])
            self.receiver = make_receiver(self, mode, self.boxes, source, first_receiver + rank)
        except Exception as error:  # noqa: BLE001 - see the class
            return self._describe_failure(error)
        return None

    @phase("receive weights")
    def receive_refit(self, version: int) -> str | None:
        self.received = None
        try:
            assert self.receiver is not None, "connect_refit() comes first"
            for tensor, copy in self.unsent_copies:
                tensor.copy_(copy)
            self.unsent_copies = ()
            with set_current_vllm_config(self.vllm_config):  # vLLM's layers read it when they convert weights
                self.receiver.receive(version)
            torch.accelerator.synchronize()
            if self.device.type == "cuda":  # the second copies of converted layers; vLLM has the rest of the memory
                torch.cuda.empty_cache()
        except Exception as error:  # noqa: BLE001 - see the class
            if self.receiver is not None:
                self.receiver.abandon()
            return self._describe_failure(error)
        self.received = version
        return None

    @phase("keep unsent tensors")
    def keep_unsent(self) -> str | None:
        """Copy what no refit fills to host memory, until the next refit."""
        from megatron_grpo.weight_sync.engine_layers import list_unsent

        try:
            unsent = list_unsent(self.model_runner.get_model(), self.boxes)
            self.unsent_copies = [(tensor, tensor.cpu()) for tensor in unsent]
        except Exception as error:  # noqa: BLE001 - see the class
            return self._describe_failure(error)
        return None

    def confirm_refit(self, version: int) -> str | None:
        # vLLM answers the other calls of a commit without its workers, so only this one notices a worker that is gone
        # or was replaced since it received the version.
        if self.received == version:
            return None
        return f"worker {self.rank} holds version {self.received} of the weights, and not {version}"

    @phase("fingerprint weights")
    def fingerprint_weights(self) -> dict[str, Fingerprint] | str:
        from megatron_grpo.weight_sync.engine_adapters import base_layers
        from megatron_grpo.weight_sync.fingerprints import fingerprint_engine

        try:
            assert self.receiver is not None, "connect_refit() comes first"
            config, model = self.vllm_config, self.model_runner.get_model()
            with set_current_vllm_config(config), set_forward_context(None, config), base_layers(model):
                return fingerprint_engine(model, config.model_config.dtype, self.boxes)
        except Exception as error:  # noqa: BLE001 - see the class
            return self._describe_failure(error)

    def describe(self) -> dict[str, Any]:
        """Describe the server in JSON types, or return {"problem": ...}."""
        # Imported here because only external servers are asked, and the families are many modules.
        from megatron_grpo.models.families.reading import read_model_shape

        config = self.vllm_config
        parallel, model = config.parallel_config, config.model_config
        if parallel.data_parallel_size > 1:
            return {"problem": "its engines share the work (data parallelism); start one server for each"}
        if model.logprobs_mode != "processed_logprobs":
            text = f"--logprobs-mode={model.logprobs_mode} must be processed_logprobs, from which tokens are drawn"
            return {"problem": text}
        if self.device.type == "cpu" and config.scheduler_config.enable_chunked_prefill:
            return {
                "problem": "a CPU engine cannot repeat a response with chunked prefill; use --no-enable-chunked-prefill"
            }
        try:
            shape = asdict(read_model_shape(model.model))
        except ValueError as error:
            return {"problem": str(error)}
        tensor = parallel.tensor_parallel_size
        return {
            "shape": json.loads(json.dumps(shape)),
            "records_experts": config.aux_output_config.enable_return_routed_experts,
            "tensor": tensor,
            "pipeline": parallel.pipeline_parallel_size,
            "expert": tensor if parallel.enable_expert_parallel else 1,
            "longest": model.max_model_len,
        }

    def _describe_failure(self, error: Exception) -> str:
        return f"worker {self.rank}: {error or type(error).__name__}"
