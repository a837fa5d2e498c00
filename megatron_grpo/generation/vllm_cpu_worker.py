"""vLLM's CPU worker, made to run pipeline stages without compilation and shares of experts, in a forked process."""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed import get_pp_group
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_grpo.generation.vllm_cpu_experts import give_ranks_their_experts
from megatron_grpo.generation.vllm_plugin import begin_process


class PipelineCPUWorker(CPUWorker):
    """Allocates the buffer for the previous stage's activations; vLLM does so in a warm-up, which eager mode skips."""

    def __init__(self, *args: Any, local_rank: int, **kwargs: Any) -> None:
        # vLLM says so to OpenMP by environment variables, which a process reads when it begins, not when it is forked.
        os.sched_setaffinity(0, parse_id_list(os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")[local_rank]))
        begin_process()
        super().__init__(*args, local_rank=local_rank, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.parallel_config.enable_expert_parallel:
            give_ranks_their_experts()
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
