"""Runs on ranks of the policy and in engines' workers: messages between two ranks, and their order (the driver's part).

`Links` hides how a message travels; senders and receivers only use `buffer`, `begin`, `emptied` and `close`. Another
communicator would replace `_send`, `_receive` and `join` here and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store, Work

from megatron_grpo.weights.families.family import WeightEntry
from megatron_grpo.weights.refit.buckets import TRAILER_BYTES
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

    def begins_with(self, entries: Sequence[WeightEntry]) -> str:
        """Name of the first tensor in it, for error messages.

        Args:
            entries: rows of the model's table.
        """
        first = self.pieces[0]
        name = entries[first["entry"]].hf[first["tensor"]].name
        return name.format(layer=first["layer"], expert=first["expert"])


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

BUFFERS = 2
"""Of a rank: one is filled or read while the other one is being sent or received."""


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
    store.set("sources", str(sources))
    store.set("dtypes", " ".join(dtypes))
    store.set("shared_memory", str(int(shared_memory)))
    _write_messages(store, "source", sources, scheduled)
    _write_messages(store, "target", targets, scheduled)


def _write_messages(store: Store, side: Side, ranks: int, scheduled: Pieces) -> None:
    order = np.argsort(scheduled[side], kind="stable")
    ends = np.cumsum(np.bincount(scheduled[side], minlength=ranks))
    for rank, mine in enumerate(np.split(order, ends[:-1])):
        packed: Any = scheduled[mine].tobytes()  # torch's stubs want a text
        store.set(f"{side}/{rank}", packed)


class Transfer:
    """A message that is being sent or received.

    Args:
        works: pending operations.
        notices: tensors that must stay alive until these are complete.
    """

    def __init__(self, works: list[Work], *notices: Tensor) -> None:
        self._works, self._notices = works, notices

    def wait(self) -> None:
        """Return when the message has arrived, and the sender's buffer may be filled again.

        Raises:
            RuntimeError: the peer or the connection has failed.
        """
        for work in self._works:
            work.wait()


class Links:
    """One rank's end of all its links.

    Between processes of one machine that compute on its CPUs, or on the same GPUs, messages go through shared memory:
    the engine's rank reads the buffer of the policy's rank. What is sent through the group is a notice with the number
    of the buffer, and the same notice back when the buffer has been read.

    Args:
        rendezvous: address and size of the group.
        side: the rank's side.
        rank: its number on that side.
        device: device of the buffers.
    """

    def __init__(self, rendezvous: Rendezvous, side: Side, rank: int, device: torch.device) -> None:
        store = rendezvous.store()
        self._side, self._device = side, device
        self._sources = int(store.get("sources"))
        self.dtypes = [getattr(torch, name) for name in store.get("dtypes").decode().split()]
        """Of what is sent, by row of the model's table."""
        self.messages = split_messages(np.frombuffer(store.get(f"{side}/{rank}"), dtype=PIECE))
        """The rank's, by turn."""
        laid = [packed_pieces(message.pieces, self.dtypes) for message in self.messages]
        self.packed_pieces: list[list[PackedPiece]] = [one for one, _ in laid]
        """Positions of the pieces, by message."""
        self.sizes = [size + TRAILER_BYTES for _, size in laid]
        """Bytes with the checksum, by message."""
        member = rank + (self._sources if side == "target" else 0)
        in_hosts = store.get("shared_memory") == b"1"
        self._memory = shared_memory_on(device, in_hosts=in_hosts, on_gpus=rendezvous.same_gpus)
        """The kind of shared memory that links may use; None: none."""
        self._sent_from = device if self._memory is None else torch.device("cpu")
        """Device of what goes through the group; notices are on the CPU."""
        members = self._sources + rendezvous.receivers
        self._group: Group | None = join(rendezvous, "reshard", member, members, self._sent_from)
        self._shared = self._share() if side == "source" else None
        """The rank's buffers, if targets on this machine may read them."""
        self._sharing: set[tuple[int, int]] = set()
        """Links that use shared memory."""
        self._mapped: dict[int, Tensor] = {}
        """Shared memory of each source that uses it."""
        self._notices: dict[int, Tensor] = {}
        """Notices of pending messages to this rank, each with the number of the buffer."""
        self._connect()
        needs = any((message.source, message.target) not in self._sharing for message in self.messages)
        self._own = self._shared.tensor if self._shared is not None else self._allocate() if needs else None
        """[BUFFERS * bytes], uint8: the rank's buffers; None on a target that reads all messages in shared memory."""

    def buffer(self, number: int) -> Tensor:
        """[bytes of the message and its checksum], uint8: the buffer of the rank's message of this number.

        Consecutive messages have different buffers. On the target, the buffer is known when the message has arrived.
        """
        notice = self._notices.get(number)
        if notice is not None:
            memory, half = self._mapped[self.messages[number].source], int(notice)
        else:
            assert self._own is not None, "messages outside shared memory have buffers"
            memory, half = self._own, number % BUFFERS
        return memory.view(BUFFERS, -1)[half, : self.sizes[number]]

    def begin(self, number: int) -> Transfer:
        """Start sending the buffer of the message of this number, or receiving into it."""
        message = self.messages[number]
        begin = self._send if self._side == "source" else self._receive
        if (message.source, message.target) not in self._sharing:
            return Transfer([begin(message, self.buffer(number))])
        notice = torch.tensor([number % BUFFERS])
        if self._side == "target":
            self._notices[number] = notice
            return Transfer([begin(message, notice)])
        self._settle()  # the message is in shared memory
        answer = torch.zeros_like(notice)
        return Transfer([begin(message, notice), self._receive(message, answer)], notice, answer)

    def emptied(self, number: int) -> None:
        """Release the buffer of a received message; views of it must not be used any more."""
        notice = self._notices.pop(number, None)
        if notice is not None:
            self._settle()  # it has been read
            self._send(self.messages[number], notice).wait()

    def close(self) -> None:
        """Leave the group: peers that wait for this rank fail at once."""
        self._group = None

    def peer(self, message: PeerMessage) -> str:
        """Name of the other end, for error messages."""
        if self._side == "source":
            return f"generation worker {message.target}"
        return f"policy rank {message.source}"

    def _share(self) -> SharedMemory | None:
        return None if self._memory is None else self._memory(BUFFERS * self._width())

    def _settle(self) -> None:
        assert self._memory is not None, "a link uses shared memory"
        self._memory.settle()

    def _allocate(self) -> Tensor:
        return torch.empty(BUFFERS * self._width(), dtype=torch.uint8, device=self._device)

    def _width(self) -> int:
        """Bytes of a buffer."""
        return int(aligned(np.array(max(self.sizes, default=0))))

    def _send(self, message: PeerMessage, data: Tensor) -> Work:
        peer = self._sources + message.target if self._side == "source" else message.source
        return self._members().send([data.view(torch.uint8)], peer, 0)

    def _receive(self, message: PeerMessage, data: Tensor) -> Work:
        peer = self._sources + message.target if self._side == "source" else message.source
        return self._members().recv([data.view(torch.uint8)], peer, 0)

    def _members(self) -> Group:
        if self._group is None:
            raise RuntimeError("the links of this rank failed before and were not made anew")
        return self._group

    def _connect(self) -> None:
        """Send a notice over every link and back, so that a broken link is noticed now and not in a refit.

        Raises:
            RuntimeError: a peer did not respond, or is not the peer of the plan.
        """
        for message in self._first_of_each_link():
            try:
                found = self._greet(message) if self._side == "source" else self._answer(message)
            except RuntimeError as error:
                raise RuntimeError(f"no link to {self.peer(message)}: {error}") from error
            if found != (message.source, message.target):
                raise RuntimeError(f"the link to {self.peer(message)} leads elsewhere: {found}")

    def _greet(self, message: PeerMessage) -> tuple[int, ...]:
        """Send a target this rank's number and the address of its buffers; the link that it returns."""
        address = self._shared.address() if self._shared is not None else [0]
        notice = torch.tensor([message.source, message.target, *address], device=self._sent_from)
        self._send(message, notice).wait()
        self._receive(message, notice).wait()
        *link, shared = notice.tolist()[:3]
        if shared:
            self._sharing.add((message.source, message.target))
        return tuple(link)

    def _answer(self, message: PeerMessage) -> tuple[int, ...]:
        """Receive a source's greeting, and return whether its buffers can be mapped here; the link that it names."""
        numbers = 1 if self._memory is None else self._memory.address_numbers
        notice = torch.zeros(2 + numbers, dtype=torch.int64, device=self._sent_from)
        self._receive(message, notice).wait()
        source, target, *address = notice.tolist()
        memory = None if self._memory is None else self._memory.seen(address)
        if memory is not None:
            self._mapped[message.source] = memory
            self._sharing.add((message.source, message.target))
        notice[2] = int(memory is not None)
        self._send(message, notice).wait()
        return source, target

    def _first_of_each_link(self) -> Iterator[PeerMessage]:
        known: set[tuple[int, int]] = set()
        for message in self.messages:
            if (message.source, message.target) not in known:
                known.add((message.source, message.target))
                yield message
