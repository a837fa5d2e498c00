"""Where the tokens of a microbatch stand when its sequences are laid end to end and split over context-parallel ranks.

Everything here is computed on the host, in NumPy: no part of a microbatch makes the host wait for the device.

With context parallelism of n, a sequence is padded to 2n chunks of equal length, and rank r holds chunks r and
2n - 1 - r: under causal attention every rank then has equally much to do (Llama 3, 2024, section 3.3.2).
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

from megatron_grpo.data.routed import UNKNOWN


@dataclass(frozen=True, slots=True)
class Membership:
    """Which sequences tokens belong to, in the order in which the layers between attention calls hold them."""

    sequence: Tensor
    """[tokens], int64: number of the token's sequence in the microbatch; padding belongs to one behind the last."""
    weight: Tensor
    """[tokens], float32: one over the tokens of the sequence; 0 on padding."""
    sequences: int


def membership(layout: PackedLayout, *, part: int, parts: int, real: bool) -> Membership:
    """Which sequences a rank's tokens belong to.

    Args:
        layout: where the tokens stand.
        part: which part of them the rank holds under sequence parallelism.
        parts: in how many parts they are split.
        real: whether they are tokens of the batch; if not, all of them count as padding.
    """
    source = held_source(layout, part=part, parts=parts)
    count = len(layout.lengths)
    sequence = np.searchsorted(np.cumsum(layout.lengths), source, side="right")
    sequence = np.where(source < 0, count, sequence)
    weight = np.append(1.0 / np.maximum(layout.lengths, 1), 0.0)[sequence].astype(np.float32) * real
    return Membership(torch.from_numpy(sequence), torch.from_numpy(weight.astype(np.float32)), count)


def held_source(layout: PackedLayout, *, part: int, parts: int) -> NDArray[np.int64]:
    """[tokens of a rank's part], int64: their indices in the flat sequences, -1 on padding; one of `parts` equal parts
    of what the context-parallel rank holds, as sequence parallelism cuts it."""
    each = layout.local_tokens // parts
    return layout.source[part * each : (part + 1) * each]


def held_routing(layout: PackedLayout, routed: Tensor, *, part: int, parts: int, real: bool) -> Tensor:
    """The recorded experts of a rank's tokens, in the order in which the layers between attention calls hold them.

    Args:
        layout: where the tokens stand.
        routed: [tokens of the flat sequences, numbers of a token], int8 or int16, on the host.
        part: which part of the tokens the rank holds under sequence parallelism.
        parts: in how many parts they are split.
        real: whether they are tokens of the batch; if not, nothing is known of them.

    Returns:
        [tokens, numbers of a token], in the dtype of `routed`; -1 on padding.
    """
    source = torch.from_numpy(held_source(layout, part=part, parts=parts))
    held = routed[source.clamp(min=0)]
    held[source < 0 if real else slice(None)] = UNKNOWN
    return held


LEAST_FILL = 0.75
"""Sequences share an attention call as long as the shortest has this share of the longest's tokens."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Parts of sequences that one attention call serves, as a rectangle; shorter ones repeat their last token."""

    queries: Tensor
    """[parts, most queries], int64: places of the queries among this rank's tokens."""
    keys: Tensor
    """[parts, most keys], int64: places of the keys among the tokens of all context-parallel ranks, rank by rank."""
    first: Tensor
    """[parts], int64: how many tokens a part's first query stands behind its first key. That has position 0, unless a
    window hides the beginning of the sequence."""
    square: bool
    """Whether every part begins with its sequence: as many queries as keys, from position 0 on."""


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """The attention calls of one layer, for all tokens of a microbatch on this rank."""

    groups: list[AttentionGroup]
    slots: Tensor | None
    """[slots], int64: each query's place among this rank's tokens, for the queries of all groups one after the other;
    None: the tokens as they are."""
    out: Tensor | None
    """[tokens of this rank], int64: the slot of each token's query; None: that of its number."""
    own_keys: bool
    """Whether the keys of all groups stand where their queries do."""


@dataclass
class PackedSequences(PackedSeqParams):
    """A microbatch's sequences as Megatron-Core's layers are told of them.

    qkv_format is "sbhd" in the torch layers: Megatron-Core then treats the microbatch as one long sequence, and only
    the rotary embedding and the attention, which are ours, look at the entries below.
    """

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[tokens of this rank], int64: position of each token in its sequence."""
    membership: Membership | None = None
    """Of this rank's tokens, or of its part of them under sequence parallelism; None: no layer asks."""
    routed: Tensor | None = None
    """[tokens of the same part, layers with experts * experts of a token], int8 or int16: which experts to send tokens
    through, -1 where the router chooses; None: it chooses everywhere."""
    calls: AttentionCalls | None = None
    """Of layers in which a token sees everything before it."""
    windowed_calls: AttentionCalls | None = None
    """Of layers with a window; None: the model has none."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of sequences whose queries are next to each other on this rank, as are the keys that these see."""

    queries: Ints
    """[parts]: number of queries."""
    keys: Ints
    """[parts]: number of keys; the last has the position of the last query."""
    first_query: Ints
    """[parts]: place of the first query among this rank's tokens."""
    first_key: Ints
    """[parts]: place of the first key among the tokens of all ranks, in the order of the sequences."""

    def within(self, window: int) -> _Parts:
        """These parts, cut so that nothing is computed of keys that no query of a part sees through the window.

        A part of at most `window` queries has fewer than twice as many keys, however long its sequence is.
        """
        blocks = -(-self.queries // window)
        part = np.repeat(np.arange(len(blocks)), blocks)
        begin = (np.arange(len(part)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * window
        queries = np.minimum(window, self.queries[part] - begin)
        position = self.keys[part] - self.queries[part] + begin  # of the first query, the first key's being 0
        hidden = np.maximum(position - window + 1, 0)
        return _Parts(
            queries, position + queries - hidden, self.first_query[part] + begin, self.first_key[part] + hidden
        )


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The places of a microbatch's tokens on one context-parallel rank."""

    source: Ints
    """[tokens of this rank]: index of each token in the flat sequences; -1 is padding."""
    positions: Ints
    """[tokens of this rank]: position of each token in its sequence."""
    places: Ints
    """[all tokens, padding included]: place of each among the tokens of all ranks, rank by rank. The order is that of
    the sequences, each padded to its width."""
    widths: Ints
    """[sequences]: tokens of each, padding included, over all ranks."""
    lengths: Ints
    """[sequences]: tokens of each."""
    rank: int
    size: int

    @property
    def local_tokens(self) -> int:
        """Tokens of each context-parallel rank, padding included."""
        return len(self.source)

    def predicting(self, wanted: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Which hidden states of this rank say something about wanted tokens: those of the token before each.

        Args:
            wanted: [tokens of the flat sequences], bool. The first of a sequence is left out: nothing predicts it.

        Returns:
            Places among this rank's tokens, and indices of the tokens that they predict in the flat sequences, both
            [predicted tokens of this rank], int64, in the order of the flat sequences.
        """
        starts, columns = np.cumsum(self.lengths) - self.lengths, np.cumsum(self.widths) - self.widths
        chosen = wanted.copy()
        chosen[starts[self.lengths > 0]] = False
        tokens = np.flatnonzero(chosen)
        sequence = np.searchsorted(np.cumsum(self.lengths), tokens, side="right")
        before = self.places[columns[sequence] + tokens - starts[sequence] - 1]
        here = before // self.local_tokens == self.rank
        return before[here] - self.rank * self.local_tokens, tokens[here]


def lay_out(
    lengths: Sequence[int], *, rank: int = 0, size: int = 1, tensor_multiple: int = 1, width: int | None = None
) -> PackedLayout:
    """Lay sequences end to end and split them over context-parallel ranks.

    Args:
        lengths: tokens of each sequence, at least one sequence of at least one token.
        rank: this context-parallel rank.
        size: number of context-parallel ranks.
        tensor_multiple: what the tokens of a rank are to be a multiple of; the last sequence is padded for it.
        width: tokens that every sequence is padded to; None: as few as can be.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    chunks = 2 * size if size > 1 else 1
    widths = -(-np.full_like(tokens, width) // chunks) * chunks if width else -(-tokens // chunks) * chunks
    unit = math.lcm(chunks, size * tensor_multiple)
    widths[-1] += -int(widths.sum()) % unit
    columns = np.cumsum(widths) - widths
    sequence = np.repeat(np.arange(len(widths)), widths)
    position = np.arange(len(sequence)) - columns[sequence]
    if size == 1:
        owner, slot = np.zeros_like(position), np.arange(len(position))
    else:
        chunk_length = (widths // chunks)[sequence]
        chunk = position // chunk_length
        owner = np.where(chunk < size, chunk, chunks - 1 - chunk)
        slot = (columns // size)[sequence] + position % chunk_length + np.where(chunk < size, 0, chunk_length)
    starts = np.cumsum(tokens) - tokens
    flat = np.where(position < tokens[sequence], starts[sequence] + position, -1)
    here = np.flatnonzero(owner == rank)
    source, positions = np.empty(len(here), dtype=np.int64), np.empty(len(here), dtype=np.int64)
    source[slot[here]], positions[slot[here]] = flat[here], position[here]
    return PackedLayout(source, positions, owner * len(here) + slot, widths, tokens, rank, size)


def _parts(layout: PackedLayout) -> _Parts:
    """Every sequence; with context parallelism, the two chunks of each that this rank has."""
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


def attention_calls(layout: PackedLayout, window: int | None = None) -> AttentionCalls:
    """The attention calls of a microbatch on this rank.

    Args:
        layout: where its tokens stand.
        window: tokens that each token sees, itself included; None: all before it.
    """
    parts = _parts(layout) if window is None else _parts(layout).within(window)
    begins, queries, keys = parts.first_query, parts.queries, parts.keys
    # Longest first: neighbours are of like length, so that little of a rectangle is padding.
    order = np.lexsort((np.arange(len(keys)), -queries, -keys))
    out = np.empty(layout.local_tokens, dtype=np.int64)
    groups, done, begin = [], 0, 0
    while begin < len(order):
        end = begin + int(np.searchsorted(-keys[order[begin:]], -LEAST_FILL * keys[order[begin]], side="right"))
        members = order[begin:end]
        most_queries, most_keys = int(queries[members].max()), int(keys[members[0]])
        query = np.minimum(np.arange(most_queries), queries[members, None] - 1) + begins[members, None]
        key = np.minimum(np.arange(most_keys), keys[members, None] - 1) + parts.first_key[members, None]
        own = queries[members]
        nth = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
        row_starts = done + np.arange(len(members)) * most_queries
        out[np.repeat(begins[members], own) + nth] = np.repeat(row_starts, own) + nth
        done += len(members) * most_queries
        groups.append(
            AttentionGroup(
                queries=torch.from_numpy(query),
                keys=torch.from_numpy(layout.places[key]),
                first=torch.from_numpy(keys[members] - queries[members]),
                square=layout.size == 1 and bool((keys[members] == queries[members]).all()),
            )
        )
        begin = end
    own_keys = layout.size == 1 and window is None
    if done == len(out) and np.array_equal(out, np.arange(done)):
        return AttentionCalls(groups, None, None, own_keys)
    slots = torch.cat([group.queries.flatten() for group in groups])
    return AttentionCalls(groups, slots, torch.from_numpy(out), own_keys)


def packed_sequences(
    layout: PackedLayout,
    transformer_engine: bool,
    window: int | None = None,
    members: Membership | None = None,
    routed: Tensor | None = None,
) -> PackedSequences:
    """What the layers are told of a microbatch.

    Args:
        layout: where its tokens stand.
        transformer_engine: whether Transformer Engine's attention does the work, which wants boundaries only.
        window: tokens that each token sees in the layers with a window, itself included; None: no layer has one.
        members: which sequences the tokens belong to; None: no layer asks.
        routed: recorded experts of the tokens, as `PackedSequences` has them; None: routers choose.
    """
    if transformer_engine:
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(layout.widths)]).astype(np.int32))
        longest = int(layout.widths.max())
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            membership=members,
            routed=routed,
        )
    return PackedSequences(
        qkv_format="sbhd",
        positions=torch.from_numpy(layout.positions),
        calls=attention_calls(layout),
        windowed_calls=None if window is None else attention_calls(layout, window),
        membership=members,
        routed=routed,
    )


def moved(sequences: PackedSequences, move: Callable[[Tensor], Tensor]) -> PackedSequences:
    """Packed sequences with every tensor, of any shape and dtype, passed through `move`: to a device, say."""

    def all_moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return move(value)
        if isinstance(value, AttentionGroup):
            return AttentionGroup(move(value.queries), move(value.keys), move(value.first), value.square)
        if isinstance(value, AttentionCalls):
            groups = [all_moved(one) for one in value.groups]
            return AttentionCalls(groups, all_moved(value.slots), all_moved(value.out), value.own_keys)
        if isinstance(value, Membership):
            return Membership(move(value.sequence), move(value.weight), value.sequences)
        return value

    return PackedSequences(**{name: all_moved(value) for name, value in vars(sequences).items()})
