"""Packing of a microbatch: sequences laid end to end, split over context-parallel ranks, and their attention calls.

Everything here is NumPy on the host, so that preparing a microbatch never waits for the device.

Without context parallelism a rank holds the sequences one after the other. With context parallelism of n the split is
zig-zag: each sequence is padded to a multiple of 2n and cut into 2n chunks, of which rank r holds chunk r and chunk
2n - 1 - r. Under causal attention chunk i costs in proportion to i + 1/2 (its queries see all chunks before it), so a
split into n consecutive parts would give the last rank almost twice the average work, while r + (2n - 1 - r) is the
same for every rank (Llama 3, 2024, section 3.3.2). With n = 2 and sequences A (8 tokens) and B (4 tokens):

    sequence order   A0 A1 | A2 A3 | A4 A5 | A6 A7 | B0 | B1 | B2 | B3
    rank 0           A0 A1 A6 A7 B0 B3          chunks 0 and 3 of each
    rank 1           A2 A3 A4 A5 B1 B2          chunks 1 and 2 of each

Each sequence is cut on its own, so a rank holds two runs of consecutive tokens of every sequence, and each run is one
part of an attention call. Its keys are the tokens of its sequence from position 0 to its own end, held by all ranks:
ranks gather keys and values, which then lie rank by rank, and `PackedLayout.gathered_index` maps sequence order to it.
The order that Transformer Engine expects for packed ("thd") sequences is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.models.routed_experts import UNKNOWN, RoutedForm

LEAST_FILL = 0.75  # sequences share an attention call if the shortest has at least this share of the longest's tokens

Ints = NDArray[np.int64]
Move = Callable[[NDArray[Any]], Tensor]  # a function that puts an array on the device


@dataclass(frozen=True, slots=True)
class Membership:
    """The sequence that each token belongs to, for layers with experts."""

    sequence: Tensor
    """[tokens], int64: index of the token's sequence in the microbatch; padding counts as one more sequence."""
    weight: Tensor  # [tokens], float32: one over the tokens of the sequence; 0 on padding
    sequences: int


@dataclass(frozen=True, slots=True)
class AttentionRectangle:
    """Parts of sequences that one attention call computes; shorter ones repeat their last token."""

    queries: Tensor  # [parts, most queries], int64: index of each query in this rank's tokens
    keys: Tensor  # [parts, most keys], int64: index of each key in the gathered tokens of all context-parallel ranks
    first: Tensor
    """[parts], int64: position of the first query minus that of the first key, which is 0 without a window."""
    square: bool  # true if every part has as many queries as keys, both from position 0: the mask is simply causal

    def make_causal_mask(self, window: int | None = None) -> Tensor:
        """Make the mask of visible keys, [parts, queries, keys].

        Those are the query itself and all before it, or the last `window` of them.
        """
        counts, device = (self.queries.shape[1], self.keys.shape[1]), self.keys.device
        query_slot, key_slot = (torch.arange(count, device=device) for count in counts)
        position = (self.first[:, None] + query_slot)[:, :, None]  # counted from the first key
        mask = key_slot <= position
        return mask if window is None else mask & (key_slot > position - window)


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """Attention calls of one layer for a microbatch on this rank."""

    rectangles: list[AttentionRectangle]
    out: Tensor  # [tokens of this rank], int64: slot of each token's query, slots counted rectangle by rectangle


@dataclass(frozen=True, slots=True)
class StateTokens:
    """Order of a microbatch's tokens, for layers that keep a state."""

    sequence: Tensor  # [tokens of all context-parallel ranks], int64: index of each token's sequence
    order: Tensor | None
    """[tokens of all ranks], int64: index of each token in the ranks' concatenated tokens; None: there is one rank."""


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """Features of images, and the places of their tokens on this rank."""

    slots: Tensor  # [image tokens of this rank], int64: index among the tokens that the rank embeds
    features: Tensor
    """[image tokens of this rank, 1 + levels, hidden]: in place of embeddings, and for the outputs of the first
    layers."""


@dataclass
class PackedSequences(PackedSeqParams):
    """A microbatch's packed sequences, an argument of Megatron-Core's layers.

    For the torch layers qkv_format is "sbhd": Megatron-Core then sees one long sequence, and only our rotary embedding,
    attention and expert router read the fields below. For Transformer Engine's it is "thd".
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[tokens of this rank], int64: position of each token in its sequence."""
    grid_positions: Tensor | None = None
    """[3, tokens of this rank], int64: positions in time, height and width; None: a model without images."""
    images: PlacedImages | None = None
    """Images of the sequences, where the rank's layers take their features; None: no sequence has one."""
    membership: Membership | None = None
    """Sequences of this rank's tokens (under sequence parallelism of its part); None: a dense model."""
    routed: Tensor | None = None
    """[tokens as in `membership`, this rank's layers with experts, experts of a token], int16: experts to route tokens
    to; -1 where the router chooses; None: the router always chooses."""
    calls: AttentionCalls | None = None
    windowed_calls: AttentionCalls | None = None
    """Attention calls of layers with a window; None: the model has no such layer."""
    state_tokens: StateTokens | None = None  # None: no layer keeps a state
    chosen: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """Masks of `calls` in sparse attention, by layer whose indexer chose, for layers that share its choice."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of sequences: consecutive queries, and the keys that they see."""

    queries: Ints  # number of queries of each part
    keys: Ints  # number of keys; the last key has the position of the last query
    first_query: Ints  # index of the first query in this rank's tokens
    first_key: Ints  # index of the first key among all tokens in sequence order

    def cut_to_window(self, window: int) -> _Parts:
        # Parts get `window` queries and the keys that these see: fewer than 2 * window, however long the sequence is.
        blocks = -(-self.queries // window)
        part = np.repeat(np.arange(len(blocks)), blocks)
        begin = (np.arange(len(part)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * window
        queries = np.minimum(window, self.queries[part] - begin)
        position = self.keys[part] - self.queries[part] + begin  # of the first query, counted from the first key
        unseen = np.maximum(position - window + 1, 0)
        return _Parts(
            queries, position + queries - unseen, self.first_query[part] + begin, self.first_key[part] + unseen
        )

    def cut_to_chunks(self, length: int) -> _Parts:
        # A part gets the queries of one chunk, and the keys of this chunk alone.
        first = self.keys - self.queries  # position of the first query
        chunks = np.where(self.queries > 0, -(-self.keys // length) - first // length, 0)
        part = np.repeat(np.arange(len(chunks)), chunks)
        nth = np.arange(len(part)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        begin = (first[part] // length + nth) * length  # position of the chunk's first token
        first_query, end = np.maximum(first[part], begin), np.minimum(self.keys[part], begin + length)
        return _Parts(
            end - first_query,
            end - begin,
            self.first_query[part] + first_query - first[part],
            self.first_key[part] + begin,
        )


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A microbatch's tokens on one context-parallel rank, in their order.

    Example: rank 0 of 2 with the sequences A and B above: source [0, 1, 6, 7, 8, 11], positions [0, 1, 6, 7, 0, 3].
    """

    source: Ints  # [tokens of this rank]: index of each token in the flat sequences; -1 is padding
    positions: Ints  # [tokens of this rank]: position of each token in its sequence
    gathered_index: Ints
    """[all tokens, padding included], in sequence order: index of each token in the ranks' concatenated tokens."""
    widths: Ints  # padded length of each sequence, over all ranks
    lengths: Ints  # number of tokens of each sequence
    rank: int
    size: int

    @property
    def local_tokens(self) -> int:
        """Tokens of each context-parallel rank, padding included."""
        return len(self.source)

    def find_predicting(self, is_predicted: NDArray[np.bool_], distance: int = 1) -> tuple[Ints, Ints]:
        """Find this rank's hidden states that predict the chosen tokens.

        `distance`: tokens from a state to the token that it belongs to; 0: the state of the token itself.

        `is_predicted`, [tokens of the flat sequences], has the chosen tokens. Returns indices into this rank's tokens,
        and the flat indices of the tokens that these predict, both [predicted tokens of this rank], in the order of the
        flat sequences. First tokens are left out: nothing predicts them.
        """
        # The state of a token predicts the next token. With context parallelism the token before may be on another rank
        # than the token itself; the rank that holds the hidden state computes the token's loss.
        starts, columns = np.cumsum(self.lengths) - self.lengths, np.cumsum(self.widths) - self.widths
        chosen = is_predicted.copy()
        if distance:
            chosen[starts[self.lengths > 0]] = False
        tokens = np.flatnonzero(chosen)
        sequence = np.searchsorted(np.cumsum(self.lengths), tokens, side="right")
        before = self.gathered_index[columns[sequence] + tokens - starts[sequence] - distance]
        is_local = before // self.local_tokens == self.rank
        return before[is_local] - self.rank * self.local_tokens, tokens[is_local]


def pad_lengths(lengths: Sequence[int], size: int, tensor_multiple: int, width: int | None) -> Ints:
    """Pad the lengths of packed sequences, as `lay_out` says; over all context-parallel ranks."""
    tokens = np.asarray(lengths, dtype=np.int64)
    chunks = 2 * size if size > 1 else 1
    widths: Ints = -(-np.full_like(tokens, width) // chunks) * chunks if width else -(-tokens // chunks) * chunks
    widths[-1] += -int(widths.sum()) % math.lcm(chunks, size * tensor_multiple)
    return widths


def lay_out(
    lengths: Sequence[int], *, rank: int = 0, size: int = 1, tensor_multiple: int = 1, width: int | None = None
) -> PackedLayout:
    """Lay sequences end to end and split them over context-parallel ranks.

    A rank's number of tokens is padded to a multiple of `tensor_multiple`, and every sequence to `width`, or without it
    only as the split needs. There is at least one sequence of at least one token.
    """
    tokens, widths = np.asarray(lengths, dtype=np.int64), pad_lengths(lengths, size, tensor_multiple, width)
    chunks = 2 * size if size > 1 else 1
    columns = np.cumsum(widths) - widths
    sequence = np.repeat(np.arange(len(widths)), widths)
    position = np.arange(len(sequence)) - columns[sequence]
    if size == 1:
        owner, slot = np.zeros_like(position), np.arange(len(position))
    else:
        chunk_length = (widths // chunks)[sequence]
        # Chunk c belongs to rank c in the first half and to rank 2n - 1 - c in the second. On its rank it follows the
        # rank's shares of the sequences before; the second chunk of a sequence follows the first.
        chunk = position // chunk_length
        owner = np.where(chunk < size, chunk, chunks - 1 - chunk)
        slot = (columns // size)[sequence] + position % chunk_length + np.where(chunk < size, 0, chunk_length)
    starts = np.cumsum(tokens) - tokens
    flat = np.where(position < tokens[sequence], starts[sequence] + position, -1)
    local = np.flatnonzero(owner == rank)
    source, positions = np.empty(len(local), dtype=np.int64), np.empty(len(local), dtype=np.int64)
    source[slot[local]], positions[slot[local]] = flat[local], position[local]
    return PackedLayout(source, positions, owner * len(local) + slot, widths, tokens, rank, size)


def _split_into_parts(layout: PackedLayout) -> _Parts:
    # One part per sequence, or two with context parallelism.
    columns = np.cumsum(layout.widths) - layout.widths
    size, rank = layout.size, layout.rank
    if size == 1:
        return _Parts(layout.widths, layout.widths, columns, columns)
    chunk = layout.widths // (2 * size)
    return _Parts(
        queries=np.concatenate([chunk, chunk]),
        keys=np.concatenate([(rank + 1) * chunk, (2 * size - rank) * chunk]),
        first_query=np.concatenate([columns // size, columns // size + chunk]),
        first_key=np.tile(columns, 2),
    )


def build_attention_calls(
    layout: PackedLayout, window: int | None, move: Move, *, chunked: bool = False
) -> AttentionCalls:
    """Build the attention calls of a microbatch.

    `window`: tokens that each token sees, itself included, or with `chunked` tokens of a chunk, of which it sees those
    before it; None: it sees all before it.
    """
    parts = _split_into_parts(layout)
    if window is not None:
        parts = parts.cut_to_chunks(window) if chunked else parts.cut_to_window(window)
    begins, queries, keys = parts.first_query, parts.queries, parts.keys
    # Longest first, so that neighbours have similar lengths and rectangles little padding.
    order = np.lexsort((np.arange(len(keys)), -queries, -keys))
    out = np.empty(layout.local_tokens, dtype=np.int64)
    rectangles, slots, begin = [], 0, 0
    while begin < len(order):
        end = begin + int(np.searchsorted(-keys[order[begin:]], -LEAST_FILL * keys[order[begin]], side="right"))
        members = order[begin:end]
        query_width, key_width = int(queries[members].max()), int(keys[members[0]])
        query = np.minimum(np.arange(query_width), queries[members, None] - 1) + begins[members, None]
        key = np.minimum(np.arange(key_width), keys[members, None] - 1) + parts.first_key[members, None]
        counts = queries[members]
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        row_starts = slots + np.arange(len(members)) * query_width
        out[np.repeat(begins[members], counts) + nth] = np.repeat(row_starts, counts) + nth
        slots += len(members) * query_width
        rectangles.append(
            AttentionRectangle(
                queries=move(query),
                keys=move(layout.gathered_index[key]),
                first=move(keys[members] - queries[members]),
                square=layout.size == 1 and bool((keys[members] == queries[members]).all()),
            )
        )
        begin = end
    return AttentionCalls(rectangles, move(out))


def select_source(layout: PackedLayout, *, part: int, parts: int, is_dummy: bool = False) -> Ints:
    """Select the flat token index at each position of a sequence-parallel part.

    -1: padding; with `is_dummy` everywhere.
    """
    tokens = layout.local_tokens // parts
    source = layout.source[part * tokens : (part + 1) * tokens]
    return np.full_like(source, -1) if is_dummy else source


def build_membership(layout: PackedLayout, source: Ints, move: Move = torch.from_numpy) -> Membership:
    """Find the sequence of each token of `source` (`select_source`)."""
    count = len(layout.lengths)
    sequence = np.where(source < 0, count, np.searchsorted(np.cumsum(layout.lengths), source, side="right"))
    weight = np.append(1.0 / np.maximum(layout.lengths, 1), 0.0)[sequence].astype(np.float32)
    return Membership(move(sequence), move(weight), count)


def select_routing(form: RoutedForm, rows: NDArray[np.uint8], source: Ints, move: Move = torch.from_numpy) -> Tensor:
    """Unpack the recorded experts of the tokens of `source`.

    `rows`: bytes of all tokens. Returns `PackedSequences.routed`.
    """
    selected = form.unpack(rows[np.maximum(source, 0)])
    selected[source < 0] = UNKNOWN
    return move(selected)


def build_state_tokens(layout: PackedLayout, move: Move = torch.from_numpy) -> StateTokens:
    """List the sequence of every token, padding included, in the order of sequences."""
    sequence = np.repeat(np.arange(len(layout.widths)), layout.widths)
    return StateTokens(move(sequence), move(layout.gathered_index) if layout.size > 1 else None)


def build_packed_sequences(
    layout: PackedLayout,
    transformer_engine: bool,
    window: int | None = None,
    move: Move = torch.from_numpy,
    *,
    chunked: bool = False,
) -> PackedSequences:
    """Build the argument of Megatron-Core's layers for a microbatch of a dense model.

    `window` and `chunked` as in `build_attention_calls`.
    """
    ends = move(np.concatenate([[0], np.cumsum(layout.widths)]).astype(np.int32))
    positions = move(layout.positions)
    if transformer_engine:
        # One tensor: Transformer Engine compares cu_seqlens_q with cu_seqlens_q_padded by identity, and takes two equal
        # tensors for sequences with padding between them, which excludes FlashAttention.
        longest = int(layout.widths.max())
        return PackedSequences(
            qkv_format="thd",
            positions=positions,
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    return PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=ends,  # for delta nets; attention reads `calls`
        positions=positions,
        calls=build_attention_calls(layout, None, move),
        windowed_calls=None if window is None else build_attention_calls(layout, window, move, chunked=chunked),
    )
