"""Stand-ins for a GPU's fused kernels and for messages of other ranks: tensors without numbers, memory and work."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.planning.dry.fused_kernel import Collective, Kernel, TensorSpec, run
from megatron_grpo.planning.dry.recomputation import recompute_without_bytes
from megatron_grpo.planning.dry.tracker import DryMode
from megatron_grpo.planning.dry.work import count_bytes, name_of, note, note_product
from megatron_grpo.trainer.model.delta_net import CHUNK
from megatron_grpo_kernels.head import CHUNK_NUMBERS, BackwardInput, Head, Statistics


def run_norm(hidden: Tensor, weight: Tensor | None) -> Tensor:
    """RMSNorm of [..., hidden]; saves its input and each row's scale, float32."""
    inputs = [hidden] if weight is None else [hidden, weight]
    saved = [(hidden.shape[:-1], torch.float32)]
    result: Tensor = run(Kernel("norm", [(hidden.shape, hidden.dtype)], keeps=range(len(inputs)), saved=saved), *inputs)
    return result


def run_attention(
    query: Tensor, key: Tensor, value: Tensor, *, context: Any = None, context_tokens: int | None = None, **named: Any
) -> Tensor:
    """Fused attention: the query's shape, with the value's last dimension.

    Args:
        query: [tokens, heads, head_dim]; without `context_tokens` [..., heads, tokens, head_dim], as in torch.
        key: like query.
        value: like query.
        context: the context-parallel process group; None: there is none.
        context_tokens: most keys that a query sees, of which causal attention computes half.
        named: other arguments of torch's attention, which change no shape.
    """
    # The kernel saves inputs, output and the logarithm of each row's sum in float32, and its backward pass sums the
    # gradient of the query in float32. With context parallelism keys and values, and their gradients, go round in two
    # buffers.
    parts = 1 if context is None else context.size()
    ring: list[TensorSpec] = [(tensor.shape, tensor.dtype) for tensor in (key, value) for _ in range(2) if parts > 1]
    keys, share = (
        (key.shape[-2], 0.5 if named.get("is_causal") else 1.0) if context_tokens is None else (context_tokens, 0.5)
    )
    pairs = share * query.numel() / query.shape[-1] * keys  # of a query and a key, over all heads
    # Ring attention passes keys and values once round all ranks; in the backward pass their gradients go with them.
    turns = parts * count_bytes([key, value])
    kernel = Kernel(
        "attention",
        [((*query.shape[:-1], value.shape[-1]), query.dtype)],
        keeps=[0, 1, 2],
        keeps_output=True,
        saved=[(query.shape[:-1], torch.float32)],
        forward=ring,
        backward=[(query.shape, torch.float32), *ring, *ring],
        attention_flops=2.0 * pairs * (query.shape[-1] + value.shape[-1]),
        messages=[Collective("ring", turns, context)] if parts > 1 else [],
        messages_back=[Collective("ring", 2 * turns, context)] if parts > 1 else [],
    )
    result: Tensor = run(kernel, query, key, value)
    return result


class ShapedLogprobs:
    """Stand-in for `FusedLogprobs`, the fused kernel for log-probabilities."""

    def compute_statistics(self, head: Head) -> Statistics:
        """Make this rank's highest logits, [tokens], and sums, [3, tokens], float32."""
        _note_logits(head)
        highest = head.hidden.new_empty(len(head.local), dtype=torch.float32)
        return Statistics(highest, highest.new_empty(3, len(head.local)))

    def compute_gradients(self, head: Head, inputs: BackwardInput) -> tuple[Tensor, Tensor | None]:
        """Make gradients like hidden states and weight."""
        for _ in range(3 if inputs.of_weight else 2):  # the logits again, and a product for each gradient
            _note_logits(head)
        # The kernel adds the gradient of hidden states up in float32, block by block of the vocabulary.
        summed = torch.empty_like(head.hidden, dtype=torch.float32)
        block = head.hidden.new_empty(min(CHUNK_NUMBERS, len(head.local) * head.columns))
        grad_weight = torch.empty_like(head.weight) if inputs.of_weight else None
        product = torch.empty_like(summed)
        del block, product
        return summed.to(head.hidden.dtype), grad_weight


def _note_logits(head: Head) -> None:
    # The logits stay in registers, so only the product is recorded.
    note_product("head", len(head.local), head.hidden.shape[1], head.columns, name_of(head.hidden.dtype))


class ShapedAdam(torch.optim.AdamW):
    """Stand-in for Transformer Engine's Adam: moments, and no other tensors."""

    def __init__(self, params: Any, adam_w_mode: bool, **settings: Any) -> None:
        super().__init__(params, **settings)

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever passed
        """Make the moments in the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                # An update reads the gradient, and reads and writes parameter and moments.
                note("elementwise", "adam", nbytes=7 * parameter.numel() * parameter.element_size())
                if not self.state[parameter]:
                    moments = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[parameter] = {"step": torch.zeros(()), **moments}


def _run_vector_norm(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1: [..., features]."""
    spec, scales = (vectors.shape, vectors.dtype), (vectors.shape[:-1], torch.float32)
    result: Tensor = run(Kernel("norm", [spec], keeps_output=True, saved=[scales]), vectors)
    return result


def _run_convolution(x: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Convolve [1, tokens, channels] over the tokens; saves its input."""
    return run(Kernel("convolution", [(x.shape, x.dtype)], keeps=[0, 1]), x, weight), None


def _run_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Run flash-linear-attention's gated delta rule on [1, tokens, heads, features]."""
    # It saves its inputs, the sums of g and the solved system of every chunk. States, and what each token adds to them,
    # are computed again in the backward pass.
    chunk, (tokens, heads, key_dim), value_dim = 64, query.shape[1:], value.shape[-1]
    saved = [((tokens, heads, chunk), query.dtype), (g.shape, torch.float32)]
    states = ((math.ceil(tokens / chunk), heads, key_dim, value_dim), query.dtype)
    added: list[TensorSpec] = [(key.shape, key.dtype), (value.shape, value.dtype), (value.shape, value.dtype)]
    products = chunk * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
    kernel = Kernel(
        "delta_rule",
        [(value.shape, value.dtype)],
        keeps=range(5),
        saved=saved,
        forward=[*added, states],
        backward=[*added, states, states],
        attention_flops=2.0 * tokens * heads * products,
    )
    return run(kernel, query, key, value, g, beta), None


def _run_torch_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Run `delta_net.compute_delta_rule`, whose operators are many and small.

    Sequences are taken to be equally long. A test compares operators and saved bytes with those of the function.
    """
    (tokens, heads, key_dim), value_dim = query.shape[1:], value.shape[-1]
    steps = math.ceil(tokens / (len(cu_seqlens) - 1) / CHUNK)
    chunks = math.ceil(tokens / CHUNK)
    saved: list[TensorSpec] = [
        ((tokens, heads, 10 * key_dim + 4 * value_dim + 5 * CHUNK + 6), torch.float32),
        ((chunks, heads, key_dim, value_dim), torch.float32),
    ]
    products = CHUNK * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
    kernel = Kernel(
        "delta_rule in torch",
        [(value.shape, value.dtype)],
        keeps=range(5),
        saved=saved,
        forward=saved[:1],
        backward=saved,
        attention_flops=2.0 * tokens * heads * products,
        operators=(8 * steps + 55, 28 * steps + 66),
    )
    return run(kernel, query, key, value, g, beta), None


def _run_rms_norm(hidden: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    return run_norm(hidden, weight)


def _run_gated(gate_and_up: Tensor, *_: Any) -> Tensor:
    """Run SwiGLU: [rows, 2 * width] to [rows, width]."""
    note("elementwise", "swiglu", nbytes=3 * count_bytes([gate_and_up]) // 2)
    return gate_and_up.new_empty(gate_and_up.shape[0], gate_and_up.shape[1] // 2)


def _run_gated_back(gradient: Tensor, *inputs: Tensor) -> Any:
    """Make gradients of gate and up, and of the rows' weights."""
    results = tuple(map(torch.empty_like, inputs))
    note("elementwise", "swiglu", nbytes=count_bytes([gradient, *inputs, *results]))
    return results[0] if len(results) == 1 else results


def _run_rope(vectors: Tensor, *_: Any, **__: Any) -> Tensor:
    # The backward pass rotates back and needs only the angles, so nothing is saved.
    result: Tensor = run(Kernel("rope", [(vectors.shape, vectors.dtype)]), vectors)
    return result


def _permute_tokens(tokens: Tensor, probs: Tensor, routing: Tensor, num_out_tokens: int) -> Any:
    """Copy tokens, [tokens, hidden], for their experts; with weights and row map."""
    # Transformer Engine's map has for each token the rows of its copies, their experts, and their number.
    results = [((num_out_tokens, tokens.shape[1]), tokens.dtype), ((num_out_tokens,), probs.dtype)]
    permuted, weights = run(Kernel("dispatch", results), tokens, probs)  # `_merge_tokens` keeps the map for both
    return permuted, weights, tokens.new_empty((routing.shape[0], 2 * routing.shape[1] + 1), dtype=torch.int32)


def _merge_tokens(
    tokens: Tensor, row_map: Tensor, merging_probs: None, restore_shape: Sequence[int], pad_offsets: None = None
) -> Tensor:
    """Sum the copies of each token: [copies, hidden] to [tokens, hidden]."""
    kernel = Kernel("dispatch", [(restore_shape, tokens.dtype)], keeps=[1])
    result: Tensor = run(kernel, tokens, row_map)
    return result


def _sort_rows(tokens: Tensor, *companions: Any) -> Any:
    """Sort rows by expert, or back, with their weights if these follow."""
    moved = [
        tokens,
        *(tensor for tensor in companions[:1] if isinstance(tensor, Tensor) and tensor.is_floating_point()),
    ]
    results = [(tensor.shape, tensor.dtype) for tensor in moved]
    return run(Kernel("dispatch", results, saved=[((len(tokens),), torch.int32)]), *moved)


def _count_tokens(self: Any, point: str, _tokens_per_expert: Any = None, *, skew: float) -> NDArray[np.int64]:
    """Count the tokens of each of this rank's experts: [local experts].

    A local expert gets `skew` times the mean, those of other ranks share the remainder; all ranks send equally.
    """
    # Replaces a method of Megatron-Core's dispatcher that copies these counts from the device, where a dry run has no
    # numbers; arguments and attributes are those of the method.
    total, count = self.routing_map.shape[0] * self.config.moe_router_topk, self.num_experts
    local_experts = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
    share = np.ones(count)
    share[local_experts] = skew
    remote_count = count - self.num_local_experts
    share[: local_experts.start] = share[local_experts.stop :] = (count - skew * self.num_local_experts) / max(
        remote_count, 1
    )
    # Rounding the running sum, not each share, keeps the total.
    ends = np.rint(np.cumsum(share) / share.sum() * total).astype(np.int64)
    tokens_per_expert = np.diff(ends, prepend=0)
    local, peers = tokens_per_expert[local_experts], self.tp_size * self.ep_size
    if peers > 1:
        self.input_splits = tokens_per_expert.reshape(self.ep_size, -1).sum(axis=1)
        self.output_splits = np.full(self.ep_size, local.sum())
        self.output_splits_tp = np.full(self.tp_size, local.sum() * self.ep_size)
    self.num_global_tokens_per_local_expert = np.tile(local, (peers, 1))
    chunks = np.arange(count * self.tp_size)
    self.sort_input_by_local_experts = chunks.reshape(-1, self.num_local_experts).T.ravel()
    self.restore_output_by_local_experts = chunks.reshape(self.num_local_experts, -1).T.ravel()
    return local * peers


def _run_l2_norm(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    note("elementwise", "norm of gradients", nbytes=count_bytes(lists[0]))
    return lists[0][0].new_empty(1, dtype=torch.float32), None


def _gather_objects(gathered: list[Any], local: Any, group: Any = None) -> None:
    # All ranks are taken to send what this rank sends.
    gathered[:] = [local] * len(gathered)


REPLACED: dict[str, Any] = {
    "megatron.core.models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb_thd": _run_rope,
    "megatron.core.models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb": _run_rope,
    "megatron.core.transformer.moe.moe_utils:HAVE_TE": True,
    "megatron.core.transformer.moe.moe_utils:fused_permute": _permute_tokens,
    "megatron.core.transformer.moe.moe_utils:fused_permute_with_probs": _permute_tokens,
    "megatron.core.transformer.moe.moe_utils:fused_unpermute": _merge_tokens,
    "megatron.core.transformer.moe.moe_utils:fused_sort_chunks_by_index": _sort_rows,
    "megatron.core.transformer.moe.moe_utils:fused_sort_chunks_by_index_with_probs": _sort_rows,
    "megatron.core.ssm.gated_delta_net.common:HAVE_FLA": True,
    "megatron.core.ssm.gated_delta_net.common:l2norm": _run_vector_norm,
    "megatron.core.ssm.gated_delta_net.gdn:causal_conv1d": _run_convolution,
    "megatron.core.ssm.gated_delta_net.gdn:chunk_gated_delta_rule": _run_delta_rule,
    "megatron_grpo.trainer.model.delta_net:compute_delta_rule": _run_torch_delta_rule,
    "megatron.core.fusions.fused_bias_swiglu:swiglu": _run_gated,
    "megatron.core.fusions.fused_bias_swiglu:swiglu_back": _run_gated_back,
    "megatron.core.fusions.fused_bias_swiglu:weighted_swiglu": _run_gated,
    "megatron.core.fusions.fused_bias_swiglu:weighted_swiglu_back": _run_gated_back,
    "megatron.core.optimizer.clip_grads:l2_norm_impl": _run_l2_norm,
    "megatron.core.optimizer:USING_PYTORCH_OPTIMIZER": False,
    "megatron.core.optimizer:Adam": ShapedAdam,
    "torch.nn.functional:scaled_dot_product_attention": run_attention,
    "torch.nn.functional:rms_norm": _run_rms_norm,
    "torch.distributed:all_gather_object": _gather_objects,
}
"""Names that are replaced during a dry run, most of them those of Transformer Engine's kernels."""


@contextmanager
def replaced_names(expert_skew: float, mode: DryMode) -> Iterator[None]:
    """Replace the names of `REPLACED`, and methods of Megatron-Core, meanwhile."""
    with ExitStack() as stack:
        for target, value in REPLACED.items():
            module, _, name = target.partition(":")
            stack.enter_context(patch.object(importlib.import_module(module), name, value, create=True))
        counts = partialmethod(_count_tokens, skew=expert_skew)
        stack.enter_context(patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", counts))
        for name in ("forward_step", "backward_step"):
            marked = partial(getattr(mode.log, name), getattr(schedules, name))
            stack.enter_context(patch.object(schedules, name, marked))
        stack.enter_context(recompute_without_bytes(mode))
        yield
