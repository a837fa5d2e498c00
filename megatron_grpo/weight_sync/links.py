"""Messages between ranks of the policy and workers of engines: the driver plans their order, and `Links` move them on
both sides. Another communicator would replace `groups.join` and nothing else."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store

from megatron_grpo.models.weight_map import WeightEntry
from megatron_grpo.weight_sync.checksums import TRAILER_BYTES, checksum_problem, write_checksum
from megatron_grpo.weight_sync.groups import Group, Rendezvous, Transfer, Watch, join
from megatron_grpo.weight_sync.ipc import SharedMemory, shared_memory_on
from megatron_grpo.weight_sync.transfer_plan import PIECE, PackedPiece, Pieces, aligned, packed_pieces, tensor_name


def split_messages(scheduled: Pieces) -> list[Pieces]:
    """The pieces of each message of one rank, by turn; `scheduled`: the rank's pieces in the result of `schedule`."""
    return np.split(scheduled, np.flatnonzero(_changes(scheduled["turn"]))[1:]) if len(scheduled) else []


def schedule(pieces: Pieces, bucket_bytes: int) -> Pieces:
    """Assign each piece to a message: the pieces of a rank that have the same turn are one message.

    A message has at most `bucket_bytes`, unless a single piece is larger than half of that.

    Sends and receives wait for their peer, so an unlucky order could make ranks wait for each other in a circle: A for
    B, B for C, C for A. Turns exclude that. A message has one turn, the same at both ends; a rank has at most one
    message a turn, and goes through its messages by increasing turn. Consider the unfinished message with the smallest
    turn: neither of its two ranks has an earlier message left, so both have reached it and it can proceed. By induction
    all messages are sent.

    Args:
        pieces: all pieces of a refit, ordered so that a parameter is complete soon after it was begun.
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
    """[n], bool: whether each value differs from the one before; True for the first."""
    return np.append(True, values[1:] != values[:-1])


Side = Literal["source", "target"]
"""source: ranks of the policy; target: ranks of the engines."""

BUFFERS = 2
"""Buffers of a rank: one is filled or read while the other one is being sent or received."""


def write_plan(
    store: Store, scheduled: Pieces, sources: int, targets: int, dtypes: Sequence[str], shared_memory: bool
) -> None:
    """Write every rank's messages into the store.

    Args:
        store: the store of the rendezvous.
        scheduled: all pieces, by turn.
        sources: ranks of the policy.
        targets: ranks of all engines.
        dtypes: dtype in which tensors are sent, by row of the weight map.
        shared_memory: whether ranks of one machine use shared memory where possible.
    """
    common = {"sources": sources, "dtypes": dtypes, "shared_memory": shared_memory}
    store.set("plan", json.dumps(common))
    for side, ranks in (("source", sources), ("target", targets)):
        order = np.argsort(scheduled[side], kind="stable")
        ends = np.cumsum(np.bincount(scheduled[side], minlength=ranks))
        for rank, mine in enumerate(np.split(order, ends[:-1])):
            # Many pieces are equal but for a number or two, and all plans go through the driver's one store.
            packed: Any = zlib.compress(scheduled[mine].tobytes(), level=1)  # torch's stubs want a text
            store.set(f"{side}/{rank}", packed)


class Links:
    """One rank's end of all its links.

    Between processes of one machine that compute on its CPUs, or on the same GPUs, messages are handed over in shared
    memory: the engine's rank reads the buffer of the policy's rank. Only a notice with the number of the buffer goes
    through the group, and the same notice comes back when the buffer has been read.

    Args:
        rendezvous: address and size of the group.
        side: the rank's side.
        rank: its number on that side.
        device: device of the buffers.
        entries: rows of the weight map, for error messages.
    """

    def __init__(
        self, rendezvous: Rendezvous, side: Side, rank: int, device: torch.device, entries: Sequence[WeightEntry]
    ) -> None:
        store = rendezvous.store()
        plan = json.loads(store.get("plan"))
        sources = plan["sources"]
        self._sends, self._rank, self._entries = side == "source", rank, entries
        self.dtypes = [getattr(torch, name) for name in plan["dtypes"]]
        """Dtype in which tensors are sent, by row of the weight map."""
        self.messages = split_messages(np.frombuffer(zlib.decompress(store.get(f"{side}/{rank}")), dtype=PIECE))
        """Pieces of each of the rank's messages, by turn."""
        self._peers = [int(pieces["target" if self._sends else "source"][0]) for pieces in self.messages]
        """Number of the rank at the other end, by message."""
        laid = [packed_pieces(pieces, self.dtypes) for pieces in self.messages]
        self.packed_pieces: list[list[PackedPiece]] = [one for one, _ in laid]
        """Positions of the pieces, by message."""
        self.sizes = [size + TRAILER_BYTES for _, size in laid]
        """Bytes of each message."""
        nbytes = BUFFERS * aligned(max(self.sizes, default=0))
        self._memory = shared_memory_on(device, in_hosts=plan["shared_memory"], on_gpus=rendezvous.same_gpus)
        """The kind of shared memory that links may use; None: none."""
        self._sent_from = device if self._memory is None else torch.device("cpu")
        """Device of the tensors that go through the group: the CPU if messages may be handed over in shared memory."""
        member = rank if self._sends else sources + rank
        self._first_peer = sources if self._sends else 0
        """Number in the group of the first rank of the other side."""
        self._group: Group | None = None
        self._watch = Watch(store, rendezvous.timeout_s)
        offered = self._memory(nbytes) if self._memory is not None and self._sends else None
        self._shared: dict[int, Tensor] = {}
        """The source's buffers in shared memory, by peer that uses them."""
        self._notices, self._answers = torch.arange(BUFFERS), torch.arange(BUFFERS)
        """Notices of pending messages in shared memory: the number of the buffer, and the answer to the source."""
        with self._failing_together():
            size = sources + rendezvous.receivers
            self._group = self._watch.call(join, rendezvous, member, size, self._sent_from)
            self._connect(store, offered)
        if offered is not None:
            self._own: Tensor | None = offered.tensor
            """[BUFFERS * bytes], uint8: the rank's buffers; None on a target to which all messages are handed over."""
        else:
            needed = not self._shared.keys() >= set(self._peers)
            self._own = torch.empty(nbytes, dtype=torch.uint8, device=device) if needed else None

    def send(self, fill: Callable[[int, Tensor], None], version: int) -> None:
        """Send one version: a message is filled while the previous one is being sent.

        Args:
            fill: writes the payload of the message of a number.
            version: number of the weights, written behind each payload.

        Raises:
            RuntimeError: a receiver stopped receiving, or the links failed before.
        """
        under_way: dict[int, list[Transfer]] = {}
        with self._failing_together():
            for number in range(len(self.messages)):
                if number >= BUFFERS:
                    self._finish(number - BUFFERS, under_way)
                buffer = self.buffer(number)
                fill(number, buffer)
                write_checksum(buffer, version)
                under_way[number] = self.begin(number)
            for number in list(under_way):
                self._finish(number, under_way)

    def receive(self, load: Callable[[int, Tensor], None], version: int) -> None:
        """Receive one version: a message is loaded while the next one arrives.

        Args:
            load: takes the payload out of the message of a number; not called any more after the first broken checksum.
            version: number that the messages should have.

        Raises:
            ValueError: a checksum was broken. Raised after the last message, so that no sender is kept waiting.
            RuntimeError: a sender stopped sending, or the links failed before.
        """
        broken: list[str] = []
        with self._failing_together():
            under_way = {number: self.begin(number) for number in range(min(BUFFERS, len(self.messages)))}
            for number, peer in enumerate(self._peers):
                self._finish(number, under_way)
                buffer = self.buffer(number)
                problem = checksum_problem(buffer, version)
                if problem is not None:
                    first = tensor_name(self._entries, self.messages[number][0])
                    broken.append(f"message {number} from {self._name(peer)}: {problem}; it begins with {first}")
                if not broken:
                    load(number, buffer)
                if self._memory is not None and peer in self._shared:
                    self._memory.settle()  # the message has been read
                    self._wait(self._move(peer, self._notices[number % BUFFERS], sends=True))
                if number + BUFFERS < len(self.messages):  # into the buffer that is free now
                    under_way[number + BUFFERS] = self.begin(number + BUFFERS)
            if broken:
                raise ValueError("; ".join(broken))

    def buffer(self, number: int) -> Tensor:
        """[bytes with the trailer], uint8: the message of this number; on a target once it has arrived."""
        memory, half = self._own, number % BUFFERS
        if not self._sends and self._peers[number] in self._shared:
            memory, half = self._shared[self._peers[number]], int(self._notices[half])
        assert memory is not None, "messages outside shared memory have buffers"
        return memory.view(BUFFERS, -1)[half, : self.sizes[number]]

    def begin(self, number: int) -> list[Transfer]:
        """Start sending the message of this number, or receiving it."""
        peer = self._peers[number]
        if self._memory is None or peer not in self._shared:
            return [self._move(peer, self.buffer(number), sends=self._sends)]
        notice = self._notices[number % BUFFERS]
        if not self._sends:
            return [self._move(peer, notice, sends=False)]
        self._memory.settle()  # the message has been written
        answer = self._answers[number % BUFFERS]
        return [self._move(peer, notice, sends=True), self._move(peer, answer, sends=False)]

    def close(self) -> None:
        """Leave the group, which ends all transfers of this process."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Give the body a deadline of its own. If it fails, all members are told, and this one leaves the group."""
        self._watch.begin()
        try:
            yield
        except BaseException as error:
            side = "policy rank" if self._sends else "generation worker"
            self._watch.fail(f"{side} {self._rank}: {error}")  # before gloo closes connections, which peers notice
            self.close()
            raise

    def _finish(self, number: int, under_way: dict[int, list[Transfer]]) -> None:
        """Wait until the message of this number has moved."""
        try:
            for transfer in under_way.pop(number):
                self._wait(transfer)
        except RuntimeError as error:
            first = tensor_name(self._entries, self.messages[number][0])
            way = "reach" if self._sends else "come from"
            which = f"message {number} of {len(self.messages)}, which begins with {first},"
            raise RuntimeError(f"{which} did not {way} {self._name(self._peers[number])}: {error}") from error

    def _wait(self, transfer: Transfer) -> None:
        self._watch.until(transfer.is_completed)
        transfer.wait()

    def _name(self, peer: int) -> str:
        return f"{'generation worker' if self._sends else 'policy rank'} {peer}"

    def _move(self, peer: int, data: Tensor, *, sends: bool) -> Transfer:
        """Start sending a tensor, [...], to a peer, or receiving it."""
        if self._group is None:
            raise RuntimeError("the links of this rank failed before and were not made anew")
        begin = self._group.send if sends else self._group.recv
        return begin([data.reshape(-1).view(torch.uint8)], self._first_peer + peer, 0)

    def _connect(self, store: Store, offered: SharedMemory | None) -> None:
        """Send a notice over every link, so that a broken link is noticed now and not in a refit; a source offers its
        memory, and the notice that comes back says whether the target can map it.

        Raises:
            RuntimeError: a peer did not respond, or is not the peer of the plan.
        """
        for peer in dict.fromkeys(self._peers):
            link = [self._rank, peer] if self._sends else [peer, self._rank]
            notice = torch.tensor([*link, 0], device=self._sent_from)
            try:
                memory = self._greet(peer, notice, store, offered)
            except RuntimeError as error:
                raise RuntimeError(f"no link to {self._name(peer)}: {error}") from error
            if notice[:2].tolist() != link:
                raise RuntimeError(f"the link to {self._name(peer)} leads elsewhere: {tuple(notice[:2].tolist())}")
            if memory is not None:
                self._shared[peer] = memory

    def _greet(self, peer: int, notice: Tensor, store: Store, offered: SharedMemory | None) -> Tensor | None:
        """Send a notice, [3], over a link; returns the memory in which messages are handed over, or None.

        Where the source offers memory the notice comes back, since messages there are answered. Elsewhere it does not:
        NCCL keeps buffers for each direction that was ever used.
        """
        source, target = notice[:2].tolist()
        key = f"memory/{source}/{target}"
        if self._sends:
            store.set(key, json.dumps(None if offered is None else offered.address()))
            self._first(peer, notice, sends=True)
            if offered is None:
                return None
            self._first(peer, notice, sends=False)
            return offered.tensor if notice[2] else None
        self._first(peer, notice, sends=False)
        address = json.loads(store.get(key))
        if address is None:
            return None
        memory = self._memory.seen(address) if self._memory is not None else None
        notice[2] = int(memory is not None)
        self._first(peer, notice, sends=True)
        return memory

    def _first(self, peer: int, notice: Tensor, *, sends: bool) -> None:
        """Move the first data to a peer, or from it: NCCL connects the two then, and blocks until the peer does so."""
        self._wait(self._watch.call(lambda: self._move(peer, notice, sends=sends)))
