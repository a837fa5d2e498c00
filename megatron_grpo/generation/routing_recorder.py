"""Records, in a worker process of a CPU engine, which experts every token of a request goes through."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = dict[int, NDArray[np.int16]]
"""By number of a layer with experts, [tokens, experts of a token]: the experts that tokens go through."""


class RoutingRecorder:
    """The layers with experts of this rank's stage. Every rank sees all tokens of its stage.

    Tokens whose keys and values come from the prefix cache do not pass the model: what was recorded when they did is
    kept by block of that cache.

    Args:
        model: vLLM's model, loaded.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self._step: Rows = {}
        self._requests: dict[str, list[Rows]] = {}
        """By vLLM's name of a request, its tokens in pieces."""
        self._blocks: dict[str, list[int]] = {}
        """By request, its blocks of the KV cache."""
        self._by_block: defaultdict[int, Rows] = defaultdict(dict)
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._capture, module.layer_id))

    def _capture(self, layer: int, experts: Tensor) -> None:
        """[tokens of the pass, experts of a token], integers, of a layer."""
        self._step[layer] = experts.to(torch.int16).numpy().copy()

    def end_step(self, scheduled: Any, order: list[str], block_size: int) -> None:
        """Share out what was captured in a forward pass.

        Args:
            scheduled: vLLM's SchedulerOutput of the pass.
            order: requests in the order of their tokens in the pass; others may be among them.
            block_size: tokens of a block of the KV cache.
        """
        starts, begun = self._follow(scheduled)
        step, self._step = self._step, {}
        passed: dict[str, Rows] = {}
        begin = 0
        for request in order:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count:
                passed[request] = {layer: experts[begin : begin + count] for layer, experts in step.items()}
                self._keep(self._blocks[request], starts[request], passed[request], block_size)
                begin += count
        # Not before all are kept: a request may find in the cache what another one puts there in the same pass.
        for request in begun:
            self._requests[request] = [self._cached(request, starts[request], block_size)]
        for request, rows in passed.items():
            self._requests[request].append(rows)

    def _follow(self, scheduled: Any) -> tuple[dict[str, int], list[str]]:
        """Learn which blocks requests have.

        Returns:
            The position of each request's first token in this pass; and the requests that begin, or begin anew.
        """
        starts, begun = {}, []
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self._blocks[new.req_id] = list(new.block_ids[0])
            begun.append(new.req_id)
        cached = scheduled.scheduled_cached_reqs
        for request, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            starts[request] = computed
            blocks = [] if added is None else list(added[0])
            if request in cached.resumed_req_ids:  # it had lost its blocks
                self._blocks[request] = blocks
                begun.append(request)
            else:
                self._blocks[request] += blocks
        for request in scheduled.finished_req_ids:
            self._blocks.pop(request, None)
        return starts, begun

    def _cached(self, request: str, tokens: int, block_size: int) -> Rows:
        """What is kept of the first tokens of a request, which are whole blocks."""
        kept = [self._by_block[block] for block in self._blocks[request][: tokens // block_size]]
        layers = kept[0] if kept else {}
        return {layer: np.concatenate([one[layer] for one in kept]) for layer in layers}

    def _keep(self, blocks: list[int], start: int, rows: Rows, block_size: int) -> None:
        """Keep rows of tokens from position `start` on by their blocks."""
        for layer, experts in rows.items():
            position = 0
            while position < len(experts):
                block, offset = divmod(start + position, block_size)
                count = min(block_size - offset, len(experts) - position)
                kept = self._by_block[blocks[block]]
                if layer not in kept:
                    kept[layer] = np.empty((block_size, experts.shape[1]), dtype=np.int16)
                kept[layer][offset : offset + count] = experts[position : position + count]
                position += count

    def take(self, name: str) -> Rows:
        """What is known of a finished request, which is forgotten; empty when it never ran.

        Args:
            name: the request's, as whoever added it called it: vLLM appends a hyphen and something random.
        """
        internal = next((one for one in self._requests if one.rpartition("-")[0] == name), None)
        if internal is None:
            return {}
        pieces = [piece for piece in self._requests.pop(internal) if piece]
        return {layer: np.concatenate([piece[layer] for piece in pieces]) for layer in pieces[0]} if pieces else {}
