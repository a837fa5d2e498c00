"""Runs on the driver: assigns pieces of a refit to messages, and messages to turns."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.distributed import Store

from megatron_grpo.weight_sync.pieces import Pieces, align, mark_changes


def schedule_messages(pieces: Pieces, bucket_bytes: int) -> Pieces:
    """Assign each piece to a message: a rank's pieces of one turn.

    Args:
        pieces: all pieces of a refit, ordered so that a parameter is complete soon after it was begun.
        bucket_bytes: most bytes of a message, unless a single piece is larger than half of it.

    Returns:
        The pieces by turn, with their turns.
    """
    ordered = pieces[np.lexsort((pieces["target"], pieces["source"]))]
    link_begins = np.flatnonzero(mark_changes(ordered["source"]) | mark_changes(ordered["target"]))
    links = np.repeat(np.arange(len(link_begins)), np.diff(link_begins, append=len(ordered)))
    sizes = align(ordered["bytes"])
    offsets = np.cumsum(sizes) - sizes
    # Each link's bytes are cut every half bucket, and pieces that begin in the same cut form one message. The last
    # piece may extend into the next cut, but has at most half a bucket, so that the message fits a bucket.
    halves = (offsets - offsets[link_begins][links]) // max(bucket_bytes // 2, 1)
    begins = np.flatnonzero(mark_changes(links) | mark_changes(halves))
    turns = _assign_turns(ordered[begins], np.arange(len(begins)) - np.searchsorted(begins, link_begins)[links[begins]])
    ordered["turn"] = np.repeat(turns, np.diff(begins, append=len(ordered)))
    return ordered[np.argsort(ordered["turn"], kind="stable")]


def _assign_turns(first_pieces: Pieces, numbers: np.ndarray) -> np.ndarray:
    """Give each message the first turn that is free at both of its ends.

    Args:
        first_pieces: [messages], PIECE: the first piece of each message.
        numbers: [messages], int64: number of each message on its link, from 0.
    """
    # Sends and receives wait for their peer, so an unlucky order could make ranks wait for each other in a circle: A
    # for B, B for C, C for A. Turns exclude that. A message has one turn, the same at both ends; a rank has at most one
    # message a turn, and goes through its messages by increasing turn. Consider the unfinished message with the
    # smallest turn: neither of its two ranks has an earlier message left, so both have reached it and it can proceed.
    # By induction all messages are sent.
    turns = np.empty(len(first_pieces), dtype=np.int32)
    free_turns: defaultdict[tuple[str, int], int] = defaultdict(int)
    sources, targets = first_pieces["source"], first_pieces["target"]
    # Links advance together. In a round, neighbouring ranks have different peers, as in a round robin.
    for message in np.lexsort((sources, targets - sources, numbers)).tolist():
        source, target = ("source", int(sources[message])), ("target", int(targets[message]))
        turns[message] = max(free_turns[source], free_turns[target])
        free_turns[source] = free_turns[target] = int(turns[message]) + 1
    return turns


def write_plan(
    store: Store, scheduled: Pieces, sources: int, targets: int, dtypes: Sequence[str], shared_memory: bool
) -> None:
    """Write every rank's messages into the store of the rendezvous.

    Args:
        store: store that all ranks reach.
        scheduled: all pieces, by turn.
        sources: number of the policy's ranks.
        targets: number of ranks of all engines.
        dtypes: dtype in which tensors are sent, by row of the weight map.
        shared_memory: whether ranks of one machine use shared memory where possible.
    """
    common = {"sources": sources, "dtypes": dtypes, "shared_memory": shared_memory}
    store.set("plan", json.dumps(common))
    for side, ranks in (("source", sources), ("target", targets)):
        order = np.argsort(scheduled[side], kind="stable")
        ends = np.cumsum(np.bincount(scheduled[side], minlength=ranks))
        for rank, indices in enumerate(np.split(order, ends[:-1])):
            # Many pieces are equal but for a number or two, and all plans go through the driver's one store.
            packed: Any = zlib.compress(scheduled[indices].tobytes(), level=1)  # torch's stubs want a text
            store.set(f"{side}/{rank}", packed)
