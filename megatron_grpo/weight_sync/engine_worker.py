"""Runs in an engine's worker: the receiving half of a refit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context

from megatron_grpo.cluster.phases import phase
from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.weight_sync.broadcast import BroadcastReceiver
from megatron_grpo.weight_sync.files import FilesReceiver
from megatron_grpo.weight_sync.fingerprints import Fingerprint, engine_fingerprints
from megatron_grpo.weight_sync.groups import Rendezvous
from megatron_grpo.weight_sync.reshard import ReshardReceiver, shard_of_worker

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object  # vLLM mixes RefitWorker into whichever worker class it runs


Receiver = BroadcastReceiver | ReshardReceiver | FilesReceiver
"""A worker's end of a connected refit. When `receive(version)` fails with a ValueError or RuntimeError, `abandon()`
makes a later refit possible; until that refit the model holds no complete version."""

_RECEIVERS: dict[RefitMode, type[Any]] = {
    "broadcast": BroadcastReceiver,
    "reshard": ReshardReceiver,
    "files": FilesReceiver,
}


class RefitWorker(Worker):
    """Methods that vLLM adds to its worker class (`worker_extension_cls`).

    The methods return an error's text and never raise: when several workers raise, vLLM's executor reads only the first
    response, and takes the second one for the response to its next call.
    """

    received: int | None = None
    """The complete version that this worker holds; None before the first refit and after a failed one."""
    receiver: Receiver | None = None
    """This worker's end of the refit, once it is connected."""

    @phase("connect the refit")
    def connect_refit(self, mode: RefitMode, rendezvous: dict[str, Any], first_receiver: int) -> str | None:
        """Connect to the policy. The rendezvous comes as a dict: vLLM's messages carry plain types only."""
        self.receiver = None
        try:
            where = rendezvous if mode == "files" else Rendezvous(**rendezvous)
            self.receiver = _RECEIVERS[mode](self, where, first_receiver + self.parallel_config.rank)
        except Exception as error:  # noqa: BLE001 - see the class
            return self._failure(error)
        return None

    @phase("receive weights")
    def receive_refit(self, version: int) -> str | None:
        """Receive one version, and load it into the model."""
        self.received = None
        try:
            assert self.receiver is not None, "connect_refit() comes first"
            with set_current_vllm_config(self.vllm_config):  # vLLM's layers read it when they convert weights
                self.receiver.receive(version)
            torch.accelerator.synchronize()
            self.model_runner.reset_lora_state()
        except Exception as error:  # noqa: BLE001 - see the class
            if self.receiver is not None:
                self.receiver.abandon()
            return self._failure(error)
        self.received = version
        return None

    def confirm_refit(self, version: int) -> str | None:
        """Check that this worker holds a version. The other calls of a commit do not reach vLLM's workers."""
        if self.received == version:
            return None
        return f"worker {self.rank} holds version {self.received} of the weights, and not {version}"

    @phase("fingerprint weights")
    def fingerprint_weights(self) -> dict[str, Fingerprint] | str:
        """Fingerprints of this worker's weights as its kernels hold them (`engine_fingerprints`)."""
        try:
            config = self.vllm_config
            shape = read_model_shape(config.model_config.model)
            shard, model = shard_of_worker(self, shape), self.model_runner.get_model()
            with set_current_vllm_config(config), set_forward_context(None, config):
                return engine_fingerprints(model, config.model_config.dtype, shape, shard)
        except Exception as error:  # noqa: BLE001 - see the class
            return self._failure(error)

    def describe(self) -> dict[str, Any]:
        """The server's properties that a run checks, in JSON types; {"problem": ...} if it cannot be used."""
        config = self.vllm_config
        parallel, model = config.parallel_config, config.model_config
        if parallel.data_parallel_size > 1:
            return {"problem": "its engines share the work (data parallelism); start one server for each"}
        if model.logprobs_mode != "processed_logprobs":
            text = f"--logprobs-mode={model.logprobs_mode} must be processed_logprobs, from which tokens are drawn"
            return {"problem": text}
        if self.device.type == "cpu" and config.scheduler_config.enable_chunked_prefill:
            return {"problem": "a CPU engine that cuts prompts into pieces cannot repeat a response"}
        try:
            shape = asdict(read_model_shape(model.model))
        except ValueError as error:
            return {"problem": str(error)}
        tensor = parallel.tensor_parallel_size
        return {
            "shape": json.loads(json.dumps(shape)),
            "tensor": tensor,
            "pipeline": parallel.pipeline_parallel_size,
            "expert": tensor if parallel.enable_expert_parallel else 1,
            "longest": model.max_model_len,
        }

    def _failure(self, error: Exception) -> str:
        return f"worker {self.rank}: {error or type(error).__name__}"
