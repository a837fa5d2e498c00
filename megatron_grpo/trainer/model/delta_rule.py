"""Functions of a gated delta net in plain torch, for packed sequences, where flash-linear-attention does not serve.

Their names, arguments and results are those of flash-linear-attention's functions, as Megatron-Core calls them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
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
