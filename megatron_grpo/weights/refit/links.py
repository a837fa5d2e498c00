"""The links between ranks of the policy and of the engines: one group of all of them, and what each has to send."""

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


def split_messages(scheduled: Pieces) -> list[PeerMessage]:
    """The messages of one rank, from what `schedule` says of it, in the order in which it is to go through them."""
    cuts = np.flatnonzero(_changes(scheduled["turn"]))[1:]
    parts = np.split(scheduled, cuts) if len(scheduled) else []
    return [PeerMessage(int(part["source"][0]), int(part["target"][0]), part) for part in parts]


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


Side = Literal["source", "target"]
"""source: ranks of the policy; target: ranks of the engines."""

BUFFERS = 2
"""Of a rank: one is filled or emptied while the other one is under way."""


def write_plan(
    store: Store, scheduled: Pieces, sources: int, targets: int, dtypes: Sequence[str], shared_memory: bool
) -> None:
    """Tell every rank its messages.

    Args:
        store: where the ranks meet.
        scheduled: all pieces, by turn.
        sources: ranks of the policy.
        targets: ranks of all engines.
        dtypes: types of what is sent, by row of the model's table.
        shared_memory: whether ranks of one machine hand messages over in memory, where they can.
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
    """A message under way.

    Args:
        works: what has to be waited for.
        words: what must not be freed meanwhile.
    """

    def __init__(self, works: list[Work], *words: Tensor) -> None:
        self._works, self._words = works, words

    def wait(self) -> None:
        """Return when the message is there, and its buffer on the side of the policy may be filled anew.

        Raises:
            RuntimeError: the rank at the other end, or the way to it, has failed.
        """
        for work in self._works:
            work.wait()


class Links:
    """One rank's end of all its links.

    Between processes of one machine that compute on its CPUs, or on the same GPUs, a message is handed over: the rank
    of the engine reads it in the memory of the policy's rank. What is sent is a word that it is there, and one back
    that it has been read.

    Args:
        rendezvous: where to meet.
        side: which side the rank is on.
        rank: its number there.
        device: where buffers are.
    """

    def __init__(self, rendezvous: Rendezvous, side: Side, rank: int, device: torch.device) -> None:
        store = rendezvous.store()
        self._side, self._device = side, device
        self._sources = int(store.get("sources"))
        self.dtypes = [getattr(torch, name) for name in store.get("dtypes").decode().split()]
        """Of what is sent, by row of the model's table."""
        self.messages = split_messages(np.frombuffer(store.get(f"{side}/{rank}"), dtype=PIECE))
        """The rank's, in the order in which it goes through them."""
        laid = [packed_pieces(message.pieces, self.dtypes) for message in self.messages]
        self.packed_pieces: list[list[PackedPiece]] = [one for one, _ in laid]
        """By message, where its pieces lie in it."""
        self.sizes = [size + TRAILER_BYTES for _, size in laid]
        """By message, its bytes with the checksum."""
        member = rank + (self._sources if side == "target" else 0)
        in_hosts = store.get("shared_memory") == b"1"
        self._memory = shared_memory_on(device, in_hosts=in_hosts, on_gpus=rendezvous.same_gpus)
        """In which messages may be handed over."""
        self._sent_from = device if self._memory is None else torch.device("cpu")
        """Where what goes through the group is: only words where messages are handed over."""
        members = self._sources + rendezvous.receivers
        self._group: Group | None = join(rendezvous, "reshard", member, members, self._sent_from)
        self._shared = self._share() if side == "source" else None
        """Where the rank's buffers are, for targets on this machine."""
        self._handed: set[tuple[int, int]] = set()
        """Links over which messages are handed over in memory."""
        self._mapped: dict[int, Tensor] = {}
        """By source, the memory in which it hands messages over to this rank."""
        self._words: dict[int, Tensor] = {}
        """By message under way to this rank, the word that says in which buffer it is handed over."""
        self._connect()
        needs = any((message.source, message.target) not in self._handed for message in self.messages)
        self._own = self._shared.tensor if self._shared is not None else self._allocate() if needs else None
        """[BUFFERS * bytes], uint8: the rank's buffers; a target that is handed all messages has none."""

    def buffer(self, number: int) -> Tensor:
        """[bytes of the message and its checksum], uint8: the buffer of the rank's message of this number.

        Two messages of which one directly follows the other have different buffers. That of a message to this rank is
        known when the message is there.
        """
        word = self._words.get(number)
        if word is not None:
            memory, place = self._mapped[self.messages[number].source], int(word)
        else:
            assert self._own is not None, "messages that are not handed over have buffers"
            memory, place = self._own, number % BUFFERS
        return memory.view(BUFFERS, -1)[place, : self.sizes[number]]

    def begin(self, number: int) -> Transfer:
        """Begin to send what is in the buffer of the message of this number, or to receive it."""
        message = self.messages[number]
        begin = self._send if self._side == "source" else self._receive
        if (message.source, message.target) not in self._handed:
            return Transfer([begin(message, self.buffer(number))])
        word = torch.tensor([number % BUFFERS])
        if self._side == "target":
            self._words[number] = word
            return Transfer([begin(message, word)])
        self._settle()  # the message is in the memory
        answer = torch.zeros_like(word)
        return Transfer([begin(message, word), self._receive(message, answer)], word, answer)

    def emptied(self, number: int) -> None:
        """Let the buffer of this message to the rank be filled anew; no view of it is to be used from here on."""
        word = self._words.pop(number, None)
        if word is not None:
            self._settle()  # it has been read
            self._send(self.messages[number], word).wait()

    def close(self) -> None:
        """End the rank's membership: whoever waits at the other end of a link is told at once."""
        self._group = None

    def peer(self, message: PeerMessage) -> str:
        """Who is at the other end, for a message to people."""
        if self._side == "source":
            return f"generation worker {message.target}"
        return f"policy rank {message.source}"

    def _share(self) -> SharedMemory | None:
        return None if self._memory is None else self._memory(BUFFERS * self._width())

    def _settle(self) -> None:
        assert self._memory is not None, "something is handed over"
        self._memory.settle()

    def _allocate(self) -> Tensor:
        return torch.empty(BUFFERS * self._width(), dtype=torch.uint8, device=self._device)

    def _width(self) -> int:
        """Bytes of a buffer."""
        return int(aligned(np.array(max(self.sizes, default=0))))

    def _send(self, message: PeerMessage, words: Tensor) -> Work:
        peer = self._sources + message.target if self._side == "source" else message.source
        return self._members().send([words.view(torch.uint8)], peer, 0)

    def _receive(self, message: PeerMessage, words: Tensor) -> Work:
        peer = self._sources + message.target if self._side == "source" else message.source
        return self._members().recv([words.view(torch.uint8)], peer, 0)

    def _members(self) -> Group:
        if self._group is None:
            raise RuntimeError("the links of this rank failed before and were not made anew")
        return self._group

    def _connect(self) -> None:
        """Send a word over every link and back, so that one which does not work is known now and not in a refit.

        Raises:
            RuntimeError: a peer did not answer, or is another than the plan says.
        """
        for message in self._first_of_each_link():
            try:
                found = self._greet(message) if self._side == "source" else self._answer(message)
            except RuntimeError as error:
                raise RuntimeError(f"no link to {self.peer(message)}: {error}") from error
            if found != (message.source, message.target):
                raise RuntimeError(f"the link to {self.peer(message)} leads elsewhere: {found}")

    def _greet(self, message: PeerMessage) -> tuple[int, ...]:
        """Tell a target who this is and where the buffers are; the link that answers."""
        address = self._shared.address() if self._shared is not None else [0]
        word = torch.tensor([message.source, message.target, *address], device=self._sent_from)
        self._send(message, word).wait()
        self._receive(message, word).wait()
        *link, handed = word.tolist()[:3]
        if handed:
            self._handed.add((message.source, message.target))
        return tuple(link)

    def _answer(self, message: PeerMessage) -> tuple[int, ...]:
        """Hear from a source, and tell it whether its buffers can be seen here; the link that it names."""
        numbers = 1 if self._memory is None else self._memory.address_numbers
        word = torch.zeros(2 + numbers, dtype=torch.int64, device=self._sent_from)
        self._receive(message, word).wait()
        source, target, *address = word.tolist()
        memory = None if self._memory is None else self._memory.seen(address)
        if memory is not None:
            self._mapped[message.source] = memory
            self._handed.add((message.source, message.target))
        word[2] = int(memory is not None)
        self._send(message, word).wait()
        return source, target

    def _first_of_each_link(self) -> Iterator[PeerMessage]:
        known: set[tuple[int, int]] = set()
        for message in self.messages:
            if (message.source, message.target) not in known:
                known.add((message.source, message.target))
                yield message
