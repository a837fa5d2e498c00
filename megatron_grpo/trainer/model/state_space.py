"""Mamba-2's convolution and recurrence of packed sequences, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens that are computed together; states pass from chunk to chunk."""


def convolve_packed(x: Tensor, weight: Tensor, bias: Tensor, sequence: Tensor) -> Tensor:
    """Causal convolution of each channel over its own sequence, and SiLU.

    Args:
        x: [tokens, channels], sequence after sequence.
        weight: [channels, kernel]; the last column multiplies the token itself.
        bias: [channels].
        sequence: [tokens], int64: index of each token's sequence.

    Returns:
        [tokens, channels], in the dtype of `x`, computed in float32.
    """
    inputs, factors = x.float(), weight.float()
    result = inputs * factors[:, -1] + bias.float()
    for back in range(1, min(weight.shape[1], len(x))):
        is_same = F.pad(sequence[:-back], (back, 0), value=-1) == sequence
        earlier = F.pad(inputs[:-back], (0, 0, back, 0))
        result = result + torch.where(is_same[:, None], earlier, 0.0) * factors[:, -1 - back]
    return F.silu(result).type_as(x)


def scan_states(x: Tensor, dt: Tensor, decay: Tensor, write: Tensor, read: Tensor, sequence: Tensor) -> Tensor:
    """Run the recurrence of each head over each sequence.

    Dao and Gu 2024, "Transformers are SSMs", section 6. The state S, [state, head_dim], is zero before the first token
    of a sequence, and becomes at token t

        S_t = exp(dt_t decay) S_(t-1) + dt_t write_t x_t^T

    and the output is S_t^T read_t. Within a chunk all tokens are computed at once, from the state before the chunk and
    from each other; a chunk may hold tokens of several sequences.

    Args:
        x: [tokens, heads, head_dim], sequence after sequence.
        dt: [tokens, heads], above 0.
        decay: [heads], below 0.
        write: [tokens, groups, state]; neighbouring heads share a group. The paper calls it B.
        read: like `write`. The paper calls it C.
        sequence: [tokens], int64: index of each token's sequence.

    Returns:
        [tokens, heads, head_dim], float32, as all arguments but the last are.
    """
    tokens, groups = len(x), write.shape[1]
    padding = -tokens % CHUNK
    written, read = (_cut(values, padding).movedim(1, 2) for values in (write, read))  # [chunks, groups, CHUNK, state]
    # Heads of a group stand behind it: [chunks, groups, heads, CHUNK, head_dim], and without the last of them.
    values = _cut(x * dt[..., None], padding).unflatten(2, (groups, -1)).movedim(1, 3)
    logs = _cut(dt * decay, padding).unflatten(2, (groups, -1)).movedim(1, 3).cumsum(dim=-1)
    member = F.pad(sequence, (0, padding), value=-1).unflatten(0, (-1, CHUNK))
    last = member[:, -1]  # sequence whose state a chunk passes on
    before = F.pad(last[:-1], (1, 0), value=-1)  # sequence whose state a chunk gets
    # Tokens of the same sequence, up to the reader: [chunks, reader, writer].
    is_seen = (member[:, :, None] == member[:, None, :]).tril()
    between = _exponentiate(logs[..., :, None] - logs[..., None, :], is_seen[:, None, None])
    scores = read @ written.transpose(-1, -2)
    within = (scores[:, :, None] * between) @ values
    to_end = _exponentiate(logs[..., -1:] - logs, (member == last[:, None])[:, None, None])
    added = torch.einsum("cgjn,cghjp->cghnp", written, values * to_end[..., None])
    retained = _exponentiate(logs[..., -1], (before == last)[:, None, None])[..., None, None]
    state, states = torch.zeros_like(added[0]), []
    for chunk in range(len(added)):
        states.append(state)
        state = state * retained[chunk] + added[chunk]
    from_before = _exponentiate(logs, (member == before[:, None])[:, None, None])
    outputs = within + torch.einsum("cgin,cghnp->cghip", read, torch.stack(states)) * from_before[..., None]
    return outputs.movedim(3, 1).flatten(2, 3).flatten(0, 1)[:tokens]


def _cut(values: Tensor, padding: int) -> Tensor:
    """Cut tokens into chunks: [tokens, ...] to [chunks, CHUNK, ...]."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, padding)).unflatten(0, (-1, CHUNK))


def _exponentiate(logs: Tensor, is_kept: Tensor) -> Tensor:
    """Compute exp(logs) where `is_kept`, and 0 elsewhere, also in the gradient."""
    return logs.masked_fill(~is_kept, -torch.inf).exp()
