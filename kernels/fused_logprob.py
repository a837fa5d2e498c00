"""Log-probabilities from hidden states in Triton: logits live in registers, a tile at a time.

Forward, one kernel multiplies and reduces: no logit reaches memory. Backward, a kernel makes the logits again, a block
of the vocabulary at a time, and writes their gradient, [tokens, columns of the block], for two products in torch.

Why the gradient of a block is held: separate kernels for the two gradients would each compute the logits again, and one
kernel for both would sum into shared results in no fixed order. What remains are plain matrix products, at which the
vendor's library is best; the block adds one write and two reads. Not yet timed on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_grpo_kernels.head import CHUNK_NUMBERS, BackwardInput, Head, Statistics

PROGRAMS = 1024
"""Number of programs that the forward kernel aims at: several for each processor of a GPU (an H100 has 132). With few
tokens the vocabulary is split too. The number, and so the order of sums, is the same on all devices."""


_Tile = dict[str, int]
"""Size of the tile of logits that a program has in registers, TOKENS x COLUMNS; it sums WIDTH products at a time."""

HALF: _Tile = {"TOKENS": 128, "COLUMNS": 128, "WIDTH": 64, "num_warps": 8, "num_stages": 3}
SINGLE: _Tile = {"TOKENS": 64, "COLUMNS": 64, "WIDTH": 32, "num_warps": 4, "num_stages": 3}
"""Tiles for 16-bit floats (tensor cores), and for float32."""


class FusedLogprobs:
    """The Triton kernel: holds `CHUNK_NUMBERS` gradients of logits in the backward pass, and next to nothing before."""

    def statistics(self, head: Head) -> Statistics:
        """Statistics of this rank's part of the vocabulary: highest [tokens] and sums [3, tokens], both float32."""
        hidden, real, tile = _checked(head)
        tokens, token_tiles, column_tiles = len(hidden), *_tiles(len(hidden), head.columns, tile)
        splits = min(column_tiles, triton.cdiv(PROGRAMS, token_tiles))
        columns_of_split = triton.cdiv(column_tiles, splits) * tile["COLUMNS"]
        splits = triton.cdiv(head.columns, columns_of_split)  # each split has at least one column
        highest = torch.empty(splits, tokens, dtype=torch.float32, device=hidden.device)
        sums = torch.empty(3, splits, tokens, dtype=torch.float32, device=hidden.device)
        # Consecutive programs share their columns, so that the weight is read from memory once, then from the cache.
        _reduce_logits[token_tiles, splits](
            hidden,
            real,
            head.local,
            highest,
            sums,
            tokens,
            head.columns,
            hidden.shape[1],
            columns_of_split,
            head.scale,
            **_settings(tile, hidden),
        )
        top = highest.amax(dim=0)
        return Statistics(top, Statistics(highest, sums).relative_to(top).sum(dim=1))

    def gradients(self, head: Head, inputs: BackwardInput) -> tuple[Tensor, Tensor | None]:
        """Gradients in the shapes and dtypes of hidden states and weight; padding gets zeros, a frozen weight None."""
        hidden, real, tile = _checked(head)
        tokens, dtype = len(hidden), hidden.dtype
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros_like(head.weight) if inputs.of_weight else None
        size = max(1, CHUNK_NUMBERS // tokens // tile["COLUMNS"]) * tile["COLUMNS"]
        for first in range(0, head.columns, size):
            block = real[first : first + size]
            grad = torch.empty(tokens, len(block), dtype=dtype, device=hidden.device)
            _differentiate_logits[_tiles(tokens, len(block), tile)](
                hidden,
                block,
                head.local - first,
                grad,
                inputs.logsumexp,
                inputs.entropy,
                inputs.of_logprobs.contiguous(),
                # Without the entropy's gradient the kernel does not read this pointer, but needs one.
                inputs.entropy if inputs.of_entropy is None else inputs.of_entropy.contiguous(),
                tokens,
                len(block),
                hidden.shape[1],
                head.scale,
                OF_ENTROPY=inputs.of_entropy is not None,
                **_settings(tile, hidden),
            )
            grad_hidden += _product(grad, block)
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[first : first + len(block)])
        return grad_hidden.to(dtype), grad_weight


def _checked(head: Head) -> tuple[Tensor, Tensor, _Tile]:
    """Hidden states, [tokens, hidden], and the weight without padding, [columns, hidden], as the kernels read them.

    Raises:
        ValueError: the fused kernel does not take this device or dtype.
    """
    hidden, weight = head.hidden, head.weight
    if not hidden.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"the fused kernel was given tensors on {hidden.device}, and Triton compiles for GPUs; use "
            "policy.logprob_kernel=chunked, or set TRITON_INTERPRET=1 before the start (slow, for tests)"
        )
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16) or hidden.dtype != weight.dtype:
        raise ValueError(
            f"the fused kernel was given hidden states in {hidden.dtype} and a weight in {weight.dtype}, and takes "
            "both in the same of float32, bfloat16 and float16; use policy.logprob_kernel=chunked"
        )
    return hidden.contiguous(), head.real.contiguous(), SINGLE if hidden.dtype == torch.float32 else HALF


def _tiles(tokens: int, columns: int, tile: _Tile) -> tuple[int, int]:
    """Number of tiles over [tokens, columns], in each direction."""
    return triton.cdiv(tokens, tile["TOKENS"]), triton.cdiv(columns, tile["COLUMNS"])


def _settings(tile: _Tile, hidden: Tensor) -> dict[str, int | bool]:
    """Compile-time constants of both kernels."""
    # The interpreter stores bfloat16 as integers, and would multiply the integers.
    widens = triton.knobs.runtime.interpret and hidden.dtype == torch.bfloat16
    return {**tile, "EVEN": hidden.shape[1] % tile["WIDTH"] == 0, "WIDEN": widens}


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[tokens, block] @ [block, hidden], any float type, to [tokens, hidden] in float32, never rounded to 16 bits."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@triton.jit
def _logits(
    hidden: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    tokens: tl.tensor,
    all_columns: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    TOKENS: tl.constexpr,  # noqa: N803  # as Triton's users write what a kernel is compiled for
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Logits of rows and columns, [TOKENS, COLUMNS], float32; an index past the end gets those of the last."""
    inner = tl.arange(0, WIDTH)
    # Offsets are in 64 bits, for weights of more than 2^31 elements. Clamping is cheaper than a mask on every load.
    left = hidden + tl.minimum(rows, tokens - 1).to(tl.int64)[:, None] * width + inner[None, :]
    right = weight + tl.minimum(columns, all_columns - 1).to(tl.int64)[None, :] * width + inner[:, None]
    z = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in range(0, width, WIDTH):
        if EVEN:
            h = tl.load(left + start)
            w = tl.load(right + start)
        else:
            there = start + inner < width
            h = tl.load(left + start, mask=there[None, :], other=0.0)
            w = tl.load(right + start, mask=there[:, None], other=0.0)
        if WIDEN:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        z = tl.dot(h, w, z, input_precision="ieee")
    return z * scale


@triton.jit
def _reduce_logits(
    hidden: tl.tensor,
    weight: tl.tensor,
    local: tl.tensor,
    highest: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    all_columns: tl.tensor,
    width: tl.tensor,
    columns_of_split: tl.tensor,
    scale: tl.tensor,
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> None:
    """`Statistics` of splits of the vocabulary: [tokens, width] and [columns, width] to [(3,) splits, tokens].

    Grid: tiles of tokens, splits. Sums are relative to the highest logit so far (Milakov & Gimelshein 2018).
    """
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    target = tl.load(local + rows, mask=rows < tokens, other=-1)
    top = tl.full((TOKENS,), float("-inf"), tl.float32)
    exponentials = tl.zeros((TOKENS,), tl.float32)
    weighted = tl.zeros((TOKENS,), tl.float32)
    of_target = tl.zeros((TOKENS,), tl.float32)
    first = tl.program_id(1) * columns_of_split
    for start in range(first, tl.minimum(first + columns_of_split, all_columns), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        z = _logits(
            hidden, weight, rows, columns, tokens, all_columns, width, scale, TOKENS, COLUMNS, WIDTH, EVEN, WIDEN
        )
        there = (columns < all_columns)[None, :]
        of_target += tl.sum(tl.where(there & (columns[None, :] == target[:, None]), z, 0.0), axis=1)
        higher = tl.maximum(top, tl.max(tl.where(there, z, float("-inf")), axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top - higher)  # nothing was added up before the first tile
        factor = tl.exp(shift)
        below = z - higher[:, None]
        weights = tl.where(there, tl.exp(below), 0.0)
        weighted = (weighted + exponentials * shift) * factor + tl.sum(weights * tl.where(there, below, 0.0), axis=1)
        exponentials = exponentials * factor + tl.sum(weights, axis=1)
        top = higher
    place = tl.program_id(1) * tokens + rows
    kind = tl.num_programs(1) * tokens
    tl.store(highest + place, top, mask=rows < tokens)
    tl.store(sums + place, exponentials, mask=rows < tokens)
    tl.store(sums + kind + place, weighted, mask=rows < tokens)
    tl.store(sums + 2 * kind + place, of_target, mask=rows < tokens)


@triton.jit
def _differentiate_logits(
    hidden: tl.tensor,
    weight: tl.tensor,
    local: tl.tensor,
    grad: tl.tensor,
    logsumexp: tl.tensor,
    entropy: tl.tensor,
    of_logprobs: tl.tensor,
    of_entropy: tl.tensor,
    tokens: tl.tensor,
    all_columns: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    OF_ENTROPY: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> None:
    """Gradient of the products weight @ hidden: a tile of [tokens, columns of the block], in the dtype of `grad`.

    Grid: tiles of tokens, tiles of columns. d log p / dz_j = 1[target] - p_j and dH / dz_j = -p_j (log p_j + H).
    """
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = _logits(hidden, weight, rows, columns, tokens, all_columns, width, scale, TOKENS, COLUMNS, WIDTH, EVEN, WIDEN)
    wanted = rows < tokens
    target = tl.load(local + rows, mask=wanted, other=-1)
    coefficient = tl.load(of_logprobs + rows, mask=wanted, other=0.0)[:, None]
    logp = z - tl.load(logsumexp + rows, mask=wanted, other=0.0)[:, None]
    factor = -coefficient
    if OF_ENTROPY:
        surprise = logp + tl.load(entropy + rows, mask=wanted, other=0.0)[:, None]
        factor -= tl.load(of_entropy + rows, mask=wanted, other=0.0)[:, None] * surprise
    gradient = tl.exp(logp) * factor + tl.where(columns[None, :] == target[:, None], coefficient, 0.0)
    place = grad + rows.to(tl.int64)[:, None] * all_columns + columns[None, :]
    inside = wanted[:, None] & (columns < all_columns)[None, :]
    tl.store(place, (gradient * scale).to(grad.dtype.element_ty), mask=inside)
