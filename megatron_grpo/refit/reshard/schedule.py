"""Pieces into messages, and messages into an order in which nobody waits in a circle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_grpo.models.weight_map import WeightEntry
from megatron_grpo.refit.reshard.plan import Pieces
from megatron_grpo.refit.reshard.wire import aligned


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces that go from one rank of the policy to one rank of the engines in one transfer."""

    source: int
    target: int
    pieces: Pieces
    """In the order in which they lie in the message."""

    def begins_with(self, entries: Sequence[WeightEntry]) -> str:
        """Name of the first tensor of which there is something in it, for a message to people.

        Args:
            entries: rows of the model's table.
        """
        first = self.pieces[0]
        name = entries[first["entry"]].hf[first["tensor"]].name
        return name.format(layer=first["layer"], expert=first["expert"])


def messages_of(scheduled: Pieces) -> list[Message]:
    """The messages of one rank, from what `schedule` says of it, in the order in which it is to go through them."""
    cuts = np.flatnonzero(_changes(scheduled["turn"]))[1:]
    parts = np.split(scheduled, cuts) if len(scheduled) else []
    return [Message(int(part["source"][0]), int(part["target"][0]), part) for part in parts]


def schedule(pieces: Pieces, bucket_bytes: int) -> Pieces:
    """Say in which message each piece goes: those of a rank that have the same turn are one message.

    A message has at most `bucket_bytes`, unless a single piece is larger than half of that. Every rank goes through its
    messages by turn. Both ends of the message with the smallest turn are then free for it, so that some message is
    always under way and nobody waits in a circle.

    Args:
        pieces: of one refit, in an order in which parameters are complete soon after they were begun.
        bucket_bytes: most bytes of a message; pieces have at most half as many.

    Returns:
        The pieces by turn, with their turns.
    """
    ordered = pieces[np.lexsort((pieces["target"], pieces["source"]))]
    link_begins = np.flatnonzero(_changes(ordered["source"]) | _changes(ordered["target"]))
    links = np.repeat(np.arange(len(link_begins)), np.diff(link_begins, append=len(ordered)))
    sizes = aligned(ordered["bytes"])
    offsets = np.cumsum(sizes) - sizes
    # A message holds the pieces that begin in the same half of a bucket: the last one may reach into the next half.
    halves = (offsets - offsets[link_begins][links]) // max(bucket_bytes // 2, 1)
    begins = np.flatnonzero(_changes(links) | _changes(halves))
    firsts = ordered[begins]
    numbers = np.arange(len(begins)) - np.searchsorted(begins, link_begins)[links[begins]]
    turns = np.empty(len(begins), dtype=np.int32)
    free: defaultdict[tuple[str, int], int] = defaultdict(int)
    # Links move on together. In a round a rank talks to another one than its neighbours do, as in a round robin.
    for message in np.lexsort((firsts["source"], firsts["target"] - firsts["source"], numbers)).tolist():
        source, target = ("source", int(firsts["source"][message])), ("target", int(firsts["target"][message]))
        turns[message] = max(free[source], free[target])
        free[source] = free[target] = int(turns[message]) + 1
    ordered["turn"] = np.repeat(turns, np.diff(begins, append=len(ordered)))
    return ordered[np.argsort(ordered["turn"], kind="stable")]


def _changes(values: np.ndarray) -> np.ndarray:
    """[n], bool: whether each value differs from the one before; the first does."""
    return np.append(True, values[1:] != values[:-1])
