"""vLLM's CPU worker in a forked process: pipeline stages without compilation, shares of experts, and a record of the
experts that tokens go through. vLLM's own record needs its second model runner, which needs Triton."""

from __future__ import annotations

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

from megatron_grpo.generation.cpu_engine import RECORD_ROUTING, in_core
from megatron_grpo.generation.vllm_plugin import begin_process
from megatron_grpo.platform.hooks import check_hooks


def choices_here(weights: Tensor, chosen: Tensor, place_here: Tensor, experts_here: int) -> tuple[Tensor, Tensor]:
    """Renumber the experts that tokens chose, for a rank that has only some of the experts.

    A choice of another rank's expert becomes a choice of an expert here with weight 0, spread over all experts here.

    Args:
        weights: [tokens, choices], float32, factor of the output of each chosen expert.
        chosen: [tokens, choices], int32, numbers of experts among all.
        place_here: [all experts], int32, number of each expert among those of this rank; -1: another rank has it.
        experts_here: experts of this rank.

    Returns:
        Both [tokens, choices]: weights, float32, and numbers among the experts of this rank, int32. The outputs of all
        ranks add up to those of all experts.
    """
    place = place_here[chosen.long()]
    elsewhere = place < 0
    return weights.masked_fill(elsewhere, 0.0), torch.where(elsewhere, chosen % experts_here, place).to(torch.int32)


def give_ranks_their_experts() -> None:
    """Make vLLM's CPU layers respect which experts a rank has: their kernel indexes a rank's experts by global numbers.

    Call this once in each worker that shares experts, before the model is made.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply

    @wraps(original)
    def apply(self: Any, *, w1: Tensor, expert_map: Tensor | None, **others: Any) -> None:
        assert expert_map is not None, "without expert parallelism nothing is to be replaced"
        assert not others["apply_router_weight_on_input"], "a weight of 0 must reach the output"
        weights, chosen = choices_here(others.pop("topk_weights"), others.pop("topk_ids"), expert_map, len(w1))
        original(self, w1=w1, expert_map=None, topk_weights=weights, topk_ids=chosen, **others)

    CPUUnquantizedExperts.apply = apply


Rows = dict[int, NDArray[np.int16]]
"""The experts that tokens go through, [tokens, experts of a token], by number of a layer with experts."""


class RoutingRecorder:
    """Records the experts of each token in the layers of this rank's stage; every rank sees all tokens of its stage.

    All tokens of a request pass the model, since its engine has no prefix cache (`cpu_arguments`).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._step: Rows = {}
        self._requests: defaultdict[str, list[Rows]] = defaultdict(list)
        """Recorded experts of each request in pieces, by vLLM's name of the request."""
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._capture, module.layer_id))

    def _capture(self, layer: int, experts: Tensor) -> None:
        """Keep a layer's experts in the current pass, [tokens of the pass, experts of a token], integers."""
        self._step[layer] = experts.to(torch.int16).numpy().copy()

    def end_step(self, scheduled: Any, order: list[str]) -> None:
        """Divide the experts that were captured in a forward pass among its requests.

        Args:
            scheduled: vLLM's SchedulerOutput of the pass.
            order: requests in the order of their tokens in the pass; others may be among them.
        """
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        step, self._step = self._step, {}
        begin = 0
        for request in order:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count:
                if not starts.get(request, 0):  # the request begins, or begins anew after it was preempted
                    self._requests[request] = []
                rows = {layer: experts[begin : begin + count] for layer, experts in step.items()}
                self._requests[request].append(rows)
                begin += count

    def take(self, name: str) -> Rows:
        """Return the experts of a finished request and forget it; empty if the request never ran.

        `name` is the name that the request was added under; vLLM appends a hyphen and random characters to it.
        """
        internal = next((one for one in self._requests if one.rpartition("-")[0] == name), None)
        if internal is None:
            return {}
        pieces = [piece for piece in self._requests.pop(internal) if piece]
        return {layer: np.concatenate([piece[layer] for piece in pieces]) for layer in pieces[0]} if pieces else {}


class PipelineCPUWorker(CPUWorker):
    """vLLM's CPU worker on cores of its own, with the shares of experts and the record of this module.

    It also allocates the buffer for the previous stage's activations, as vLLM does in a warm-up that eager mode skips.
    """

    _recorder: RoutingRecorder | None = None

    def __init__(self, *args: Any, local_rank: int, **kwargs: Any) -> None:
        # vLLM binds OpenMP by environment variables, which a process reads when it begins, not when it is forked.
        os.sched_setaffinity(0, parse_id_list(os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")[local_rank]))
        if not in_core():  # the core has begun already, and is the worker of a model of one rank
            begin_process()
        super().__init__(*args, local_rank=local_rank, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        check_hooks("cpu")
        if self.parallel_config.enable_expert_parallel:
            give_ranks_their_experts()
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if self.vllm_config.additional_config.get(RECORD_ROUTING):
            self._recorder = RoutingRecorder(runner.model)
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run vLLM's step, then record the experts of its tokens."""
        output = super().execute_model(scheduler_output)
        if self._recorder is not None and scheduler_output.total_num_scheduled_tokens:
            self._recorder.end_step(scheduler_output, self.model_runner.input_batch.req_ids)
        return output

    def take_routing(self, names: list[str]) -> dict[str, dict[int, bytes]]:
        """Return and forget the experts of finished requests, by the caller's names, for `recorded_experts`.

        Returns:
            By name and number of a layer with experts of this stage, the bytes of [tokens, experts of a token], int16,
            since vLLM's messages carry no arrays. Empty on all but the first tensor-parallel rank, since all of them
            see the same tokens.
        """
        if self._recorder is None or not get_tp_group().is_first_rank:
            return {}
        taken = {name: self._recorder.take(name) for name in names}
        return {name: {layer: rows.tobytes() for layer, rows in one.items()} for name, one in taken.items()}
