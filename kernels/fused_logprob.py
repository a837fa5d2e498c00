"""Log-probabilities from hidden states in Triton: logits live in registers, a tile at a time.

Forward, one kernel multiplies and reduces: no logit reaches memory. Backward, a kernel makes the logits again, a block
of the vocabulary at a time, and writes their gradient, [tokens, columns of the block], for two products in torch.

Why the gradient of a block is held: separate kernels for the two gradients would each compute the logits again, and one
kernel for both would sum into shared results in no fixed order. What remains are plain matrix products, at which the
vendor's library is best; the block adds one write and two reads (docs/gpu.md has times).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_grpo_kernels.head import CHUNK_NUMBERS, BackwardInput, Head, Statistics

# Number of programs that the forward kernel aims at: several for each processor of a GPU (an H100 has 132). With few
# tokens the vocabulary is split too. The number, and so the order of sums, is the same on all devices.
PROGRAMS = 1024

_Tile = dict[str, int]
"""Size of the tile of logits that a program has in registers, TOKENS x COLUMNS; it sums WIDTH products at a time."""

# Tiles for 16-bit floats (tensor cores), and for float32.
HALF: _Tile = {"TOKENS": 128, "COLUMNS": 128, "WIDTH": 64, "num_warps": 8, "num_stages": 3}
SINGLE: _Tile = {"TOKENS": 64, "COLUMNS": 64, "WIDTH": 32, "num_warps": 4, "num_stages": 3}


class FusedLogprobs:
    """The Triton kernel: no logits in memory, `CHUNK_NUMBERS` gradients in the backward pass."""

    def compute_statistics(self, head: Head) -> Statistics:
        hidden, weight, tile = _require_operands(head)
        tokens, token_tiles, column_tiles = len(hidden), *_count_tiles(len(hidden), head.columns, tile)
        splits = min(column_tiles, triton.cdiv(PROGRAMS, token_tiles))
        columns_of_split = triton.cdiv(column_tiles, splits) * tile["COLUMNS"]
        splits = triton.cdiv(head.columns, columns_of_split)  # each split has at least one column
        highest = torch.empty(splits, tokens, dtype=torch.float32, device=hidden.device)
        sums = torch.empty(3, splits, tokens, dtype=torch.float32, device=hidden.device)
        # Consecutive programs share their columns, so that the weight is read from memory once, then from the cache.
        _reduce_logits[token_tiles, splits](
            hidden,
            weight,
            head.local,
            highest,
            sums,
            tokens,
            head.columns,
            hidden.shape[1],
            columns_of_split,
            head.scale,
            head.cap or 1.0,
            CAPPED=head.cap is not None,
            **_list_constants(tile, hidden),
        )
        top = highest.amax(dim=0)
        return Statistics(top, Statistics(highest, sums).rebase_sums(top).sum(dim=1))

    def compute_gradients(self, head: Head, inputs: BackwardInput) -> tuple[Tensor, Tensor | None]:
        hidden, weight, tile = _require_operands(head)
        tokens, dtype = len(hidden), hidden.dtype
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros_like(head.weight) if inputs.of_weight else None
        size = max(1, CHUNK_NUMBERS // tokens // tile["COLUMNS"]) * tile["COLUMNS"]
        for first in range(0, head.columns, size):
            block = weight[first : first + size]
            grad = torch.empty(tokens, len(block), dtype=dtype, device=hidden.device)
            _differentiate_logits[_count_tiles(tokens, len(block), tile)](
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
                head.cap or 1.0,
                CAPPED=head.cap is not None,
                OF_ENTROPY=inputs.of_entropy is not None,
                **_list_constants(tile, hidden),
            )
            grad_hidden += _multiply(grad, block)
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[first : first + len(block)])
        return grad_hidden.to(dtype), grad_weight


def _require_operands(head: Head) -> tuple[Tensor, Tensor, _Tile]:
    """Return operands as the kernels read them; ValueError: another device or dtype."""
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
    return hidden.contiguous(), head.unpadded_weight.contiguous(), SINGLE if hidden.dtype == torch.float32 else HALF


def _count_tiles(tokens: int, columns: int, tile: _Tile) -> tuple[int, int]:
    return triton.cdiv(tokens, tile["TOKENS"]), triton.cdiv(columns, tile["COLUMNS"])


def _list_constants(tile: _Tile, hidden: Tensor) -> dict[str, int | bool]:
    # The interpreter stores bfloat16 as integers, and would multiply the integers.
    widens = triton.knobs.runtime.interpret and hidden.dtype == torch.bfloat16
    return {**tile, "EVEN": hidden.shape[1] % tile["WIDTH"] == 0, "WIDEN": widens}


def _multiply(grad: Tensor, block: Tensor) -> Tensor:
    """Multiply matrices of any float type to float32, never rounded to 16 bits."""
    if grad.is_cuda and grad.dtype != torch.float32:
        return torch.mm(grad, block, out_dtype=torch.float32)
    return grad.float() @ block.float()


@triton.jit
def _compute_logits(
    hidden: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    tokens: tl.tensor,
    all_columns: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,  # noqa: N803  # as Triton's users write what a kernel is compiled for
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Compute logits; an index past the end gets those of the last."""
    inner = tl.arange(0, WIDTH)
    # Offsets are in 64 bits, for weights of more than 2^31 elements. Clamping is cheaper than a mask on every load.
    hidden_pointers = hidden + tl.minimum(rows, tokens - 1).to(tl.int64)[:, None] * width + inner[None, :]
    weight_pointers = weight + tl.minimum(columns, all_columns - 1).to(tl.int64)[None, :] * width + inner[:, None]
    z = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in range(0, width, WIDTH):
        if EVEN:
            h = tl.load(hidden_pointers + start)
            w = tl.load(weight_pointers + start)
        else:
            is_inside = start + inner < width
            h = tl.load(hidden_pointers + start, mask=is_inside[None, :], other=0.0)
            w = tl.load(weight_pointers + start, mask=is_inside[:, None], other=0.0)
        if WIDEN:
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        z = tl.dot(h, w, z, input_precision="ieee")
    if CAPPED:
        z = cap - 2.0 * cap / (1.0 + tl.exp(z * (2.0 / cap)))  # cap * tanh(z / cap)
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
    cap: tl.tensor,
    CAPPED: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> None:
    """Compute `Statistics` of splits of the vocabulary: [(3,) splits, tokens]."""
    # Grid: tiles of tokens, splits. Sums are relative to the highest logit so far (Milakov & Gimelshein 2018).
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    target = tl.load(local + rows, mask=rows < tokens, other=-1)
    top = tl.full((TOKENS,), float("-inf"), tl.float32)
    exponentials = tl.zeros((TOKENS,), tl.float32)
    weighted = tl.zeros((TOKENS,), tl.float32)
    of_target = tl.zeros((TOKENS,), tl.float32)
    first = tl.program_id(1) * columns_of_split
    for start in range(first, tl.minimum(first + columns_of_split, all_columns), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        z = _compute_logits(
            hidden,
            weight,
            rows,
            columns,
            tokens,
            all_columns,
            width,
            scale,
            cap,
            CAPPED,
            TOKENS,
            COLUMNS,
            WIDTH,
            EVEN,
            WIDEN,
        )
        valid = (columns < all_columns)[None, :]
        of_target += tl.sum(tl.where(valid & (columns[None, :] == target[:, None]), z, 0.0), axis=1)
        higher = tl.maximum(top, tl.max(tl.where(valid, z, float("-inf")), axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top - higher)  # nothing was added up before the first tile
        factor = tl.exp(shift)
        below = z - higher[:, None]
        weights = tl.where(valid, tl.exp(below), 0.0)
        weighted = (weighted + exponentials * shift) * factor + tl.sum(weights * tl.where(valid, below, 0.0), axis=1)
        exponentials = exponentials * factor + tl.sum(weights, axis=1)
        top = higher
    index = tl.program_id(1) * tokens + rows
    stride = tl.num_programs(1) * tokens
    tl.store(highest + index, top, mask=rows < tokens)
    tl.store(sums + index, exponentials, mask=rows < tokens)
    tl.store(sums + stride + index, weighted, mask=rows < tokens)
    tl.store(sums + 2 * stride + index, of_target, mask=rows < tokens)


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
    cap: tl.tensor,
    CAPPED: tl.constexpr,  # noqa: N803
    OF_ENTROPY: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
) -> None:
    """Differentiate by the products weight @ hidden: a tile of the block."""
    # Grid: tiles of tokens, tiles of columns. d log p / dz_j = 1[target] - p_j and dH / dz_j = -p_j (log p_j + H).
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = _compute_logits(
        hidden,
        weight,
        rows,
        columns,
        tokens,
        all_columns,
        width,
        scale,
        cap,
        CAPPED,
        TOKENS,
        COLUMNS,
        WIDTH,
        EVEN,
        WIDEN,
    )
    is_row = rows < tokens
    target = tl.load(local + rows, mask=is_row, other=-1)
    coefficient = tl.load(of_logprobs + rows, mask=is_row, other=0.0)[:, None]
    logp = z - tl.load(logsumexp + rows, mask=is_row, other=0.0)[:, None]
    factor = -coefficient
    if OF_ENTROPY:
        surprise = logp + tl.load(entropy + rows, mask=is_row, other=0.0)[:, None]
        factor -= tl.load(of_entropy + rows, mask=is_row, other=0.0)[:, None] * surprise
    gradient = tl.exp(logp) * factor + tl.where(columns[None, :] == target[:, None], coefficient, 0.0)
    pointers = grad + rows.to(tl.int64)[:, None] * all_columns + columns[None, :]
    inside = is_row[:, None] & (columns < all_columns)[None, :]
    if CAPPED:
        share = z / (scale * cap)
        gradient *= 1.0 - share * share  # tanh' = 1 - tanh^2
    tl.store(pointers, (gradient * scale).to(grad.dtype.element_ty), mask=inside)
