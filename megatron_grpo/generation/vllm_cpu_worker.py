"""vLLM's CPU worker in a forked process: pipeline stages without compilation, shares of experts, small matrices as they
are, and a record of which experts tokens go through. vLLM's own record needs its second model runner, which a CPU
without Triton has not."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed import get_pp_group, get_tp_group
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_grpo.generation.routed_experts import RECORD_ROUTING
from megatron_grpo.generation.routing_recorder import RoutingRecorder
from megatron_grpo.generation.vllm_cpu_experts import give_ranks_their_experts
from megatron_grpo.generation.vllm_cpu_fp8 import offer_fp8_blocks
from megatron_grpo.generation.vllm_cpu_linear import keep_small_matrices
from megatron_grpo.generation.vllm_fork import in_core
from megatron_grpo.generation.vllm_plugin import begin_process


class PipelineCPUWorker(CPUWorker):
    """Allocates the buffer for the previous stage's activations; vLLM does so in a warm-up, which eager mode skips."""

    _recorder: RoutingRecorder | None = None

    def __init__(self, *args: Any, local_rank: int, **kwargs: Any) -> None:
        # vLLM says so to OpenMP by environment variables, which a process reads when it begins, not when it is forked.
        os.sched_setaffinity(0, parse_id_list(os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")[local_rank]))
        if not in_core():  # which has begun, and is the worker of a model in one piece
            begin_process()
        super().__init__(*args, local_rank=local_rank, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.parallel_config.enable_expert_parallel:
            give_ranks_their_experts()
        offer_fp8_blocks()
        keep_small_matrices()
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if self.vllm_config.additional_config.get(RECORD_ROUTING):
            self._recorder = RoutingRecorder(runner.model)
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's worker."""
        output = super().execute_model(scheduler_output)
        if self._recorder is not None and scheduler_output.total_num_scheduled_tokens:
            self._recorder.end_step(scheduler_output, self.model_runner.input_batch.req_ids, self._block_size())
        return output

    def take_routing(self, names: list[str]) -> dict[str, dict[int, bytes]]:
        """The experts of finished requests, which are forgotten here, for `chosen_experts`.

        Args:
            names: names of the requests, as the engine's caller gave them.

        Returns:
            By name and number of the layer, of this stage's layers with experts, the bytes of [tokens, experts of a
            token], int16: vLLM's messages take no arrays. Of one rank of those that split matrices only, all of which
            see the same.
        """
        if self._recorder is None or not get_tp_group().is_first_rank:
            return {}
        taken = {name: self._recorder.take(name) for name in names}
        return {name: {layer: rows.tobytes() for layer, rows in one.items()} for name, one in taken.items()}

    def _block_size(self) -> int:
        """Tokens of a block of the KV cache."""
        return int(self.vllm_config.cache_config.block_size)
