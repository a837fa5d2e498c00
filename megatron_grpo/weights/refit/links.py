"""Runs on ranks of the policy and in engines' workers: messages between two ranks, and their order (the driver's part).

`Links` hides how a message travels. Another communicator would replace `_move` and `join` here and nothing else.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store, Work

from megatron_grpo.weights.families.family import WeightEntry
from megatron_grpo.weights.refit.buckets import BUFFERS, TRAILER_BYTES, Channel
from megatron_grpo.weights.refit.groups import Group, Rendezvous, join
from megatron_grpo.weights.refit.ipc import SharedMemory, shared_memory_on
from megatron_grpo.weights.refit.plan import PIECE, PackedPiece, Pieces, aligned, packed_pieces


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """Pieces that go from one rank of the policy to one engine rank in one transfer."""

    source: int
    target: int
    pieces: Pieces
    """In their order in the message."""


def split_messages(scheduled: Pieces) -> list[PeerMessage]:
    """The messages of one rank, in the order of their turns; `scheduled` holds the rank's rows of `schedule`'s
    result."""
    cuts = np.flatnonzero(_changes(scheduled["turn"]))[1:]
    parts = np.split(scheduled, cuts) if len(scheduled) else []
    return [PeerMessage(int(part["source"][0]), int(part["target"][0]), part) for part in parts]


def schedule(pieces: Pieces, bucket_bytes: int) -> Pieces:
    """Assign each piece to a message: the pieces of a rank that have the same turn are one message.

    A message has at most `bucket_bytes`, unless a single piece is larger than half of that.

    Sends and receives wait for their peer, so an unlucky order could make ranks wait for each other in a circle: A for
    B, B for C, C for A. Turns exclude that. A message has one turn, the same at both ends; a rank has at most one
    message a turn, and goes through its messages by increasing turn. Consider the unfinished message with the smallest
    turn: neither of its two ranks has an earlier message left, so both have reached it and it can proceed. By induction
    all messages are sent.

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
    # A message holds the pieces that begin in the same half of a bucket: the last piece may extend into the next half.
    halves = (offsets - offsets[link_begins][links]) // max(bucket_bytes // 2, 1)
    begins = np.flatnonzero(_changes(links) | _changes(halves))
    firsts = ordered[begins]
    numbers = np.arange(len(begins)) - np.searchsorted(begins, link_begins)[links[begins]]
    turns = np.empty(len(begins), dtype=np.int32)
    free: defaultdict[tuple[str, int], int] = defaultdict(int)
    # Links advance together. In a round, neighbouring ranks have different peers, as in a round robin.
    for message in np.lexsort((firsts["source"], firsts["target"] - firsts["source"], numbers)).tolist():
        source, target = ("source", int(firsts["source"][message])), ("target", int(firsts["target"][message]))
        turns[message] = max(free[source], free[target])
        free[source] = free[target] = int(turns[message]) + 1
    ordered["turn"] = np.repeat(turns, np.diff(begins, append=len(ordered)))
    return ordered[np.argsort(ordered["turn"], kind="stable")]


def _changes(values: np.ndarray) -> np.ndarray:
    """[n], bool: whether each value differs from the one before; the first does."""
    return np.append(True, values[1:] != values[:-1])


Side = Literal["source", "target"]
"""source: ranks of the policy; target: ranks of the engines."""


def write_plan(
    store: Store, scheduled: Pieces, sources: int, targets: int, dtypes: Sequence[str], shared_memory: bool
) -> None:
    """Write every rank's messages into the store.

    Args:
        store: the store of the rendezvous.
        scheduled: all pieces, by turn.
        sources: ranks of the policy.
        targets: ranks of all engines.
        dtypes: types of what is sent, by row of the model's table.
        shared_memory: whether ranks of one machine use shared memory where possible.
    """
    common = {"sources": sources, "dtypes": dtypes, "shared_memory": shared_memory}
    store.set("plan", json.dumps(common))
    for side, ranks in (("source", sources), ("target", targets)):
        order = np.argsort(scheduled[side], kind="stable")
        ends = np.cumsum(np.bincount(scheduled[side], minlength=ranks))
        for rank, mine in enumerate(np.split(order, ends[:-1])):
            packed: Any = scheduled[mine].tobytes()  # torch's stubs want a text
            store.set(f"{side}/{rank}", packed)


class Links(Channel):
    """One rank's end of all its links.

    Between processes of one machine that compute on its CPUs, or on the same GPUs, messages go through shared memory:
    the engine's rank reads the buffer of the policy's rank. What is sent through the group is a notice with the number
    of the buffer, and the same notice back when the buffer has been read.

    Args:
        rendezvous: address and size of the group.
        side: the rank's side.
        rank: its number on that side.
        device: device of the buffers.
        entries: rows of the model's table, for error messages.
    """

    def __init__(
        self, rendezvous: Rendezvous, side: Side, rank: int, device: torch.device, entries: Sequence[WeightEntry]
    ) -> None:
        store = rendezvous.store()
        plan = json.loads(store.get("plan"))
        self._side, self._entries, self._sources = side, entries, plan["sources"]
        self.dtypes = [getattr(torch, name) for name in plan["dtypes"]]
        """Of what is sent, by row of the model's table."""
        self.messages = split_messages(np.frombuffer(store.get(f"{side}/{rank}"), dtype=PIECE))
        """The rank's, by turn."""
        laid = [packed_pieces(message.pieces, self.dtypes) for message in self.messages]
        self.packed_pieces: list[list[PackedPiece]] = [one for one, _ in laid]
        """Positions of the pieces, by message."""
        self.sizes = [size + TRAILER_BYTES for _, size in laid]
        nbytes = BUFFERS * aligned(max(self.sizes, default=0))
        kind = shared_memory_on(device, in_hosts=plan["shared_memory"], on_gpus=rendezvous.same_gpus)
        self._memory = kind
        """The kind of shared memory that links may use; None: none."""
        self._sent_from = device if kind is None else torch.device("cpu")
        """Device of what goes through the group; notices are on the CPU."""
        member = rank + (self._sources if side == "target" else 0)
        members = self._sources + rendezvous.receivers
        self._group: Group | None = join(rendezvous, "reshard", member, members, self._sent_from)
        shared = kind(nbytes) if kind is not None and side == "source" else None
        """The rank's buffers, if targets on this machine may read them."""
        self._sharing: set[tuple[int, int]] = set()
        """Links that use shared memory."""
        self._mapped: dict[int, Tensor] = {}
        """Shared memory of each source that uses it."""
        self._notices, self._answers = torch.arange(BUFFERS), torch.arange(BUFFERS)
        """Of pending messages in shared memory: the number of the buffer, and what comes back to its source."""
        self._connect(store, shared)
        needs = any((message.source, message.target) not in self._sharing for message in self.messages)
        own = torch.empty(nbytes, dtype=torch.uint8, device=device) if needs and shared is None else None
        self._own = own if shared is None else shared.tensor
        """[BUFFERS * bytes], uint8: the rank's buffers; None on a target that reads all messages in shared memory."""

    def buffer(self, number: int) -> Tensor:
        message = self.messages[number]
        if self._side == "target" and (message.source, message.target) in self._sharing:
            memory, half = self._mapped[message.source], int(self._notices[number % BUFFERS])
        else:
            assert self._own is not None, "messages outside shared memory have buffers"
            memory, half = self._own, number % BUFFERS
        return memory.view(BUFFERS, -1)[half, : self.sizes[number]]

    def begin(self, number: int) -> list[Work]:
        message, sends = self.messages[number], self._side == "source"
        if (message.source, message.target) not in self._sharing:
            return [self._move(message, self.buffer(number), sends=sends)]
        notice, answer = self._notices[number % BUFFERS], self._answers[number % BUFFERS]
        if not sends:
            return [self._move(message, notice, sends=False)]
        assert self._memory is not None, "the link uses shared memory"
        self._memory.settle()  # the message is in it
        return [self._move(message, notice, sends=True), self._move(message, answer, sends=False)]

    def emptied(self, number: int) -> None:
        message = self.messages[number]
        if self._memory is not None and (message.source, message.target) in self._sharing:
            self._memory.settle()  # it has been read
            self._move(message, self._notices[number % BUFFERS], sends=True).wait()

    def broken(self, number: int, problem: str) -> str:
        return f"message {number} from {self._peer(number)}: {problem}; it begins with {self._first(number)}"

    def gone(self, number: int) -> str:
        way = "reach" if self._side == "source" else "come from"
        which = f"message {number} of {len(self.messages)}, which begins with {self._first(number)},"
        return f"{which} did not {way} {self._peer(number)}"

    def _first(self, number: int) -> str:
        first = self.messages[number].pieces[0]
        name = self._entries[first["entry"]].hf[first["tensor"]].name
        return name.format(layer=first["layer"], expert=first["expert"])

    def _peer(self, number: int) -> str:
        message = self.messages[number]
        return f"generation worker {message.target}" if self._side == "source" else f"policy rank {message.source}"

    def close(self) -> None:
        self._group = None

    def _move(self, message: PeerMessage, data: Tensor, *, sends: bool) -> Work:
        """Start sending numbers, [...], to the other end of a message's link, or receiving them."""
        if self._group is None:
            raise RuntimeError("the links of this rank failed before and were not made anew")
        peer = self._sources + message.target if self._side == "source" else message.source
        begin = self._group.send if sends else self._group.recv
        work: Work = begin([data.reshape(-1).view(torch.uint8)], peer, 0)
        return work

    def _connect(self, store: Store, shared: SharedMemory | None) -> None:
        """Send a notice over every link and back, so that a broken link is noticed now and not in a refit.

        Raises:
            RuntimeError: a peer did not respond, or is not the peer of the plan.
        """
        firsts: dict[tuple[int, int], int] = {}
        for number, message in enumerate(self.messages):
            firsts.setdefault((message.source, message.target), number)
        for link, number in firsts.items():
            notice = torch.tensor([*link, 0], device=self._sent_from)
            try:
                self._greet(self.messages[number], notice, store, shared)
            except RuntimeError as error:
                raise RuntimeError(f"no link to {self._peer(number)}: {error}") from error
            *found, is_shared = notice.tolist()
            if tuple(found) != link:
                raise RuntimeError(f"the link to {self._peer(number)} leads elsewhere: {tuple(found)}")
            if is_shared:
                self._sharing.add(link)

    def _greet(self, message: PeerMessage, notice: Tensor, store: Store, shared: SharedMemory | None) -> None:
        """A source offers its memory, and hears in the notice, [3], whether that can be mapped there."""
        key = f"memory/{message.source}/{message.target}"
        if self._side == "source":
            store.set(key, json.dumps(None if shared is None else shared.address()))
            self._move(message, notice, sends=True).wait()
            self._move(message, notice, sends=False).wait()
            return
        self._move(message, notice, sends=False).wait()
        address = json.loads(store.get(key))
        memory = self._memory.seen(address) if self._memory is not None and address is not None else None
        if memory is not None:
            self._mapped[message.source] = memory
        notice[2] = int(memory is not None)
        self._move(message, notice, sends=True).wait()
