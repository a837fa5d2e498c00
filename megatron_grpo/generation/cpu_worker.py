"""vLLM's CPU worker in a forked process, with pipeline stages, expert parallelism and a record of experts."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import get_pp_group
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_grpo.generation.cpu_engine import ForkedCore
from megatron_grpo.generation.vllm_plugin import begin_process
from megatron_grpo.platform.hooks import check_hooks


def localize_choices(weights: Tensor, chosen: Tensor, local_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Renumber chosen experts for a rank with some of them.

    A choice of another rank's expert becomes a choice of a local expert with weight 0, spread over all local experts,
    so the outputs of all ranks add up to those of all experts.

    Args:
        weights: [tokens, choices], float32, factor of the output of each chosen expert; returned in this shape.
        chosen: [tokens, choices], int32, numbers of experts among all; returned as indices among this rank's.
        local_index: [all experts], int32, index of each expert among those of this rank; -1: another rank has it.
        experts: number of experts of this rank.
    """
    index = local_index[chosen.long()]
    is_remote = index < 0
    return weights.masked_fill(is_remote, 0.0), torch.where(is_remote, chosen % experts, index).to(torch.int32)


def patch_expert_layers() -> None:
    """Make vLLM's CPU layers respect which experts a rank has."""
    # Their kernel indexes a rank's experts by global numbers. This is called once, before the model is made.
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply

    @wraps(original)
    def apply(self: Any, *, w1: Tensor, expert_map: Tensor | None, **arguments: Any) -> None:
        assert expert_map is not None, "without expert parallelism nothing is to be replaced"
        assert not arguments["apply_router_weight_on_input"], "a weight of 0 must reach the output"
        weights, chosen = arguments.pop("topk_weights"), arguments.pop("topk_ids")
        weights, chosen = localize_choices(weights, chosen, expert_map, len(w1))
        original(self, w1=w1, expert_map=None, topk_weights=weights, topk_ids=chosen, **arguments)

    CPUUnquantizedExperts.apply = apply


class RoutingRecorder:
    """Records each token's experts in an engine without prefix cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._by_layer: dict[int, NDArray[np.uint16]] = {}  # of one pass: [tokens, experts of a token]
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._capture, module.layer_id))

    def _capture(self, layer: int, experts: Tensor) -> None:
        # experts: [tokens of the pass, experts of a token], integers
        self._by_layer[layer] = experts.numpy().astype(np.uint16)

    def end_pass(self, scheduled: Any, order: list[str]) -> dict[str, AuxRequestOutput]:
        """Return a pass's experts by request.

        They are [tokens, layers, experts of a token], as from vLLM's second model runner. `scheduled` is vLLM's
        SchedulerOutput; `order` has the requests in the order of their tokens.
        """
        by_layer, self._by_layer = self._by_layer, {}
        top_k = next(iter(by_layer.values())).shape[1]
        rows = np.zeros((scheduled.total_num_scheduled_tokens, max(by_layer) + 1, top_k), dtype=np.uint16)
        for layer, experts in by_layer.items():
            rows[:, layer] = experts[: len(rows)]  # without padding
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        outputs: dict[str, AuxRequestOutput] = {}
        begin = 0
        for request in order:
            if count := scheduled.num_scheduled_tokens.get(request, 0):
                # The scheduler names the first token whose experts were not returned yet. Tokens before it are computed
                # again, after a preemption or under new weights, and keep the experts of their first pass.
                first = scheduled.aux_output_connector_metadata.requests[request]
                skipped = first - starts.get(request, 0)
                outputs[request] = AuxRequestOutput(first, rows[begin + skipped : begin + count])
                begin += count
        return outputs


class RecordingCPUWorker(CPUWorker):
    """vLLM's CPU worker, which records experts where the engine returns them."""

    _recorder: RoutingRecorder | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # vLLM's own record needs its second model runner, which needs Triton.
        if self.vllm_config.aux_output_config.enable_return_routed_experts:
            self._recorder = RoutingRecorder(self.model_runner.model)

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        if self._recorder is not None and scheduler_output.total_num_scheduled_tokens:
            self._experts = self._recorder.end_pass(scheduler_output, self.model_runner.input_batch.req_ids)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self._recorder is not None:
            output.aux_output_connector_output = self._experts
        return output


class PipelineCPUWorker(RecordingCPUWorker):
    """vLLM's CPU worker with this module's additions."""

    def __init__(self, *args: Any, local_rank: int, **kwargs: Any) -> None:
        # vLLM binds OpenMP by environment variables, which a process reads when it begins, not when it is forked.
        os.sched_setaffinity(0, parse_id_list(os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")[local_rank]))
        # The core has begun already, and is the worker of a model of one rank.
        if not isinstance(multiprocessing.current_process(), ForkedCore):
            begin_process()
        super().__init__(*args, local_rank=local_rank, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        check_hooks("cpu")
        if self.parallel_config.enable_expert_parallel:
            patch_expert_layers()
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        # The buffer for the previous stage's activations, which vLLM allocates in a warm-up that eager mode skips.
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
