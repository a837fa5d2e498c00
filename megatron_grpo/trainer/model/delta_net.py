"""Megatron-Core's gated delta net for packed sequences: on a CPU too, and with results that repeat.

The functions in plain torch serve where flash-linear-attention does not. Their names, arguments and results are those
of its functions, as Megatron-Core calls them.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor

CHUNK = 32
"""Tokens of a sequence that are computed together; a state is passed from chunk to chunk."""


def normalize_vectors(x: Tensor) -> Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def convolve_packed(x: Tensor, weight: Tensor, *, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Causal convolution of each channel over its own sequence, and SiLU.

    Args:
        x: [1, tokens, channels].
        weight: [channels, kernel]; the last column multiplies the token itself.
        cu_seqlens: [sequences + 1], integers: where sequences begin, and the end of the last.

    Returns:
        [1, tokens, channels], and no state.
    """
    position = _find_positions(x.shape[1], cu_seqlens)[:, None]
    result = x[0] * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(x[0], (0, 0, back, 0))[: x.shape[1]]
        result = result + torch.where(position >= back, earlier, 0.0) * weight[:, -1 - back]
    return F.silu(result)[None], None


def _find_positions(tokens: int, ends: Tensor) -> Tensor:
    """Find each token's position in its sequence."""
    index = torch.arange(tokens, device=ends.device)
    return index - ends.long()[torch.bucketize(index, ends[1:].long(), right=True)]


def compute_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Compute the gated delta rule of each head and sequence.

    Yang et al. 2024, equation 10, in float32.

    The state S, a matrix of zeros before a sequence's first token, becomes at token t

        S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - k_t^T exp(g_t) S_(t-1)))^T

    and the output is S_t^T q_t / sqrt(key_dim). Within a chunk the corrections of all tokens solve one triangular
    system (section 3.3 there, with the decays of its tokens), so only chunks follow each other.

    Args:
        query: [1, tokens, heads, key_dim].
        key: like query.
        value: [1, tokens, heads, value_dim].
        g: [1, tokens, heads]: logarithm of each decay, at most 0.
        beta: [1, tokens, heads]: strength of each correction.
        cu_seqlens: [sequences + 1], integers: where sequences begin, and the end of the last.

    Returns:
        [1, tokens, heads, value_dim] in the dtype of `value`, and no state.
    """
    ends: Sequence[int] = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])  # those that need a step come first
    counts = [-(-lengths[number] // CHUNK) for number in order]
    # Chunks are sorted by their place in the sequence: all first ones, all second ones, and so on.
    slots = [(order[rank], step) for step in range(max(counts)) for rank, count in enumerate(counts) if step < count]
    starts = torch.tensor([ends[number] + step * CHUNK for number, step in slots])
    sizes = torch.tensor([min(CHUNK, lengths[number] - step * CHUNK) for number, step in slots])
    offset = torch.arange(CHUNK)
    is_token = (offset < sizes[:, None]).to(value.device)
    index = torch.where(offset < sizes[:, None], starts[:, None] + offset, 0).to(value.device)

    def cut(tensor: Tensor) -> Tensor:  # to [chunks, heads, CHUNK, features], zeros behind the end of a sequence
        chunks = F.embedding(index, tensor[0].float().flatten(1)) * is_token[..., None]
        return chunks.unflatten(-1, (tensor.shape[2], -1)).transpose(1, 2)

    outputs = _compute_chunks(
        cut(query) * query.shape[-1] ** -0.5, cut(key), cut(value), cut(g)[..., 0], cut(beta), _count_running(counts)
    )
    joined = outputs.transpose(1, 2)[is_token]  # [tokens, heads, value_dim], chunk by chunk
    token_index = index[is_token]
    result = torch.empty_like(joined).index_copy(0, token_index, joined)
    return result[None].to(value.dtype), None


def _count_running(counts: Sequence[int]) -> list[int]:
    """Count the sequences that have a first chunk, a second one, and so on."""
    return [sum(step < count for count in counts) for step in range(max(counts))]


def _compute_chunks(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, running: Sequence[int]
) -> Tensor:
    # All chunks are [chunks, heads, CHUNK, features]; the first `running[0]` are first chunks, and so on. A sequence
    # has the same place among the chunks of every step.
    # Logarithm of the decay from the chunk's beginning, in float64: after a large one small differences would vanish.
    decay = g.double().cumsum(dim=-1)
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~below, -torch.inf).float().exp()
    weighted = key * beta
    system = (weighted @ key.transpose(-1, -2)) * between  # the solver takes the diagonal as ones
    begun, ended = decay[..., None].float().exp(), (decay[..., -1:] - decay)[..., None].float().exp()
    both = torch.cat([value * beta, weighted * begun], dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    within = (query @ key.transpose(-1, -2)) * between
    from_state, to_state = query * begun, key * ended
    remainder = begun[..., -1:, :]
    state = key.new_zeros(running[0], *key.shape[1:2], key.shape[-1], value.shape[-1])
    outputs, begin = [], 0
    for count in running:
        step, state = slice(begin, begin + count), state[:count]
        corrections = written[step] - read[step] @ state
        outputs.append(from_state[step] @ state + within[step] @ corrections)
        state = state * remainder[step] + to_state[step].transpose(-1, -2) @ corrections
        begin += count
    return torch.cat(outputs)


logger = logging.getLogger(__name__)


class DeltaNet(GatedDeltaNet):
    """A gated delta net whose state begins anew with every packed sequence.

    Context-parallel ranks exchange their tokens for heads: each computes whole sequences of its share of the heads, so
    the key heads have to be a multiple of tensor * context.
    """

    def __init__(self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, **keywords: Any) -> None:
        has_kernels = common.HAVE_FLA and find_spec("fla") is not None and gdn.causal_conv1d is not convolve_packed
        is_dry = config.platform.name == "dry"  # a run on GPUs is refused without the kernels
        self._uses_torch = config.deterministic_mode or not (is_dry or has_kernels)
        if self._uses_torch:
            _use_torch_functions()
        config = copy.copy(config)
        config.deterministic_mode = False  # Megatron-Core's own rule for it refuses packed sequences
        # Adapters and rounding make a linear layer a partial (`layers.apply_mixin`), which Megatron-Core refuses here.
        parts = {field.name: getattr(submodules, field.name) for field in fields(submodules)}
        for name, part in parts.items():
            if isinstance(part, partial):
                parts[name] = ModuleSpec(part.func, params=part.keywords)
        super().__init__(config, GatedDeltaNetSubmodules(**parts), **keywords)
        # In float32, as vLLM has it: the decay is an exponential of an exponential of this number.
        log: Any = torch.nn.Parameter(self.get_parameter("A_log").data.float())
        log.tensor_model_parallel, log.partition_dim, log.partition_stride = True, 0, 1
        self.A_log = log

    def reset_parameters(self) -> None:
        """Draw nothing: all values are loaded."""

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        if self._uses_torch:
            self.gated_delta_rule = compute_delta_rule

    def forward(self, hidden_states: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        """Mix the tokens of each sequence: [tokens, 1, hidden], and no bias."""
        ends = packed_seq_params.cu_seqlens_q
        assert ends is not None, "the microbatch was made for a model without delta nets"
        # The torch layers' own sequences have another format.
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        return super().forward(hidden_states, None, packed_seq_params=packed)

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Not compiled: the norm sums gradients over ranks, and a compiled function may be that of another layout.
        normed: Tensor = inspect.unwrap(GatedDeltaNet._apply_gated_norm)(self, x, gate)
        return normed

    def _resolve_cu_seqlens(self, cu_seqlens_padded: Any, cu_seqlens_actual: Tensor, *_: Any, **__: Any) -> Tensor:
        return cu_seqlens_actual  # Megatron-Core would wait for the GPU to compare it with the number of tokens

    def sharded_state_dict(self, prefix: str = "", *arguments: Any, **keywords: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, *arguments, **keywords)
        adapter = f"{prefix}in_proj.lora_b"
        if adapter in state:  # its rows are the matrix's, whose sections tensor parallelism cuts one by one
            sections, names = list(self.in_proj_split_sections), self.in_proj_split_names
            state[adapter] = _split_tensor_factory(state[adapter], sections, names, 0)
        return state


def _use_torch_functions() -> None:
    if not common.HAVE_FLA and torch.cuda.is_available():
        logger.warning("flash-linear-attention is not installed: delta nets fall back to plain torch, which is slower")
    common.HAVE_FLA, common.l2norm, gdn.causal_conv1d = True, normalize_vectors, convolve_packed
