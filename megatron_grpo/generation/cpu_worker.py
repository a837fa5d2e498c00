"""vLLM's CPU worker in a forked process, with pipeline stages, expert parallelism and a record of experts."""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import get_pp_group, get_tp_group
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_grpo.generation.cpu_engine import RECORD_ROUTING, ForkedCore
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


Rows = dict[int, NDArray[np.int16]]  # experts by layer that has some: [tokens, experts of a token]


class RoutingRecorder:
    """Records each token's experts in this rank's layers, without a prefix cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._step: Rows = {}
        # Recorded experts of each request in pieces, by vLLM's name of the request.
        self._requests: defaultdict[str, list[Rows]] = defaultdict(list)
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._capture, module.layer_id))

    def _capture(self, layer: int, experts: Tensor) -> None:
        # experts: [tokens of the pass, experts of a token], integers
        self._step[layer] = experts.to(torch.int16).numpy().copy()

    def end_step(self, scheduled: Any, order: list[str]) -> None:
        # `scheduled` is vLLM's SchedulerOutput; `order` has the requests in the order of their tokens.
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        step, self._step = self._step, {}
        begin = 0
        for request in order:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count:
                if not starts.get(request, 0):  # the request begins, or begins anew after it was preempted
                    self._requests[request] = []
                self._requests[request].append({layer: rows[begin : begin + count] for layer, rows in step.items()})
                begin += count

    def take(self, name: str) -> Rows:
        """Return and forget a finished request's experts; empty if it never ran."""
        # vLLM appends a hyphen and random characters to the name as which a request was added.
        vllm_name = next((request for request in self._requests if request.rpartition("-")[0] == name), None)
        if vllm_name is None:
            return {}
        pieces = [piece for piece in self._requests.pop(vllm_name) if piece]
        return {layer: np.concatenate([piece[layer] for piece in pieces]) for layer in pieces[0]} if pieces else {}


class PipelineCPUWorker(CPUWorker):
    """vLLM's CPU worker with this module's additions."""

    _recorder: RoutingRecorder | None = None

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
        # vLLM's own record needs its second model runner, which needs Triton.
        if self.vllm_config.additional_config.get(RECORD_ROUTING):
            self._recorder = RoutingRecorder(runner.model)
        # The buffer for the previous stage's activations, which vLLM allocates in a warm-up that eager mode skips.
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        if self._recorder is not None and scheduler_output.total_num_scheduled_tokens:
            self._recorder.end_step(scheduler_output, self.model_runner.input_batch.req_ids)
        return output

    def take_routing(self, names: list[str]) -> dict[str, dict[int, bytes]]:
        """Return and forget the experts of finished requests, by name and layer.

        Experts are the bytes of [tokens, experts of a token], int16, since vLLM's messages carry no arrays.
        """
        # All tensor-parallel ranks see the same tokens.
        if self._recorder is None or not get_tp_group().is_first_rank:
            return {}
        return {name: {layer: rows.tobytes() for layer, rows in self._recorder.take(name).items()} for name in names}
