"""One rank's end of its links to the other side of a refit.

The driver schedules who sends which message when (`transfer_plan`); links carry the schedule out on each rank. To use
another communication library, replace `refit_group.join_group`.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.weight_sync.pieces import PIECE, TRAILER_BYTES, align, lay_out_pieces, split_messages
from megatron_grpo.weight_sync.refit_group import Rendezvous, Transfer, TransferGroup, Watch, join_group, list_members
from megatron_grpo.weight_sync.shared_memory import choose_shared_memory

Side = Literal["source", "target"]  # ranks of the policy; ranks of the engines
SIDE_NAMES: dict[Side, str] = {"source": "policy rank", "target": "generation worker"}

BUFFERS = 2
"""Buffers of a rank: one is filled or read while the other one is being sent or received."""


class Links(ABC):
    """One rank's end of all its links (`SourceLinks`, `TargetLinks`).

    Between processes of one machine that compute on its CPUs, or on the same GPUs, messages are handed over in shared
    memory: the engine's rank reads the buffer of the policy's rank. Only a notice with the index of the buffer goes
    through the group, and the same notice comes back when the buffer has been read.

    Where engines and policy have the same GPUs on several nodes, a message from another node has a relay: the policy's
    rank on the engine rank's GPU receives it in a group of the policy's ranks, then hands it over in shared memory.
    """

    side: ClassVar[Side]
    peer_side: ClassVar[Side]

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device, names: Sequence[str]) -> None:
        self._store = store = rendezvous.connect()
        plan = json.loads(store.get("plan"))
        self._rank, self._names = rank, names  # of all tensors, by number
        self.dtypes = [getattr(torch, name) for name in plan["dtypes"]]  # on the wire, by row of the weight map
        # The rank's messages by turn: their pieces, the rank at the other end, the pieces' positions, and their bytes.
        self.messages = split_messages(np.frombuffer(zlib.decompress(store.get(f"{self.side}/{rank}")), dtype=PIECE))
        self._peers = [self._find_peer(pieces[0]) for pieces in self.messages]
        layouts = [lay_out_pieces(pieces, self.dtypes) for pieces in self.messages]
        self.packed_pieces = [packed for packed, _ in layouts]
        self.sizes = [size + TRAILER_BYTES for _, size in layouts]
        # The kind of shared memory that links may use. With one, tensors that go through the group are on the CPU.
        shares_devices = rendezvous.devices_per_node is not None
        self._memory = choose_shared_memory(device, in_hosts=plan["shared_memory"], on_gpus=shares_devices)
        self._group_device = device if self._memory is None else torch.device("cpu")
        self._has_relays: bool = plan["relays"]
        self._sources: int = plan["sources"]
        # Only ranks of one node hand messages over in memory, and a group connects all of its members.
        per_node = rendezvous.devices_per_node if self._memory is not None else None
        self._node = None if per_node is None else rank // per_node
        self._members = list_members(rendezvous, self._sources, self._node)
        self._group: TransferGroup | None = None
        self._watch = Watch(store, rendezvous.timeout_s)
        self._shared: dict[int, Tensor] = {}  # the source's buffers in shared memory, by peer; others get messages sent
        self._notices = torch.arange(BUFFERS)  # sent in place of messages in shared memory: the buffer's index
        self._buffer_bytes = BUFFERS * align(max(self.sizes, default=0))
        # [BUFFERS * bytes], uint8: the rank's buffers; None on a target to which all messages are handed over.
        self._buffers: Tensor | None = None

    def _connect(self, rendezvous: Rendezvous) -> None:
        with self._fail_together():
            name = "group" if self._node is None else f"group of node {self._node}"
            member, size = self._find_member(self.side, self._rank), sum(map(len, self._members))
            self._group = self._watch.call(join_group, rendezvous, member, size, self._group_device, name)
            self._open_links()

    def _find_member(self, side: Side, rank: int) -> int:
        """Find the rank in the group of a rank of one side."""
        sources, targets = self._members
        return sources.index(rank) if side == "source" else len(sources) + targets.index(rank)

    @abstractmethod
    def _find_peer(self, piece: Any) -> int:
        """Find the rank at the other end of a message's link.

        `piece`: the message's first.
        """

    @abstractmethod
    def _open_link(self, peer: int, notice: Tensor) -> Tensor | None:
        """Move the first notice over a link; return shared memory, if any."""

    def view_buffer(self, number: int) -> Tensor:
        """View a message's buffer: [bytes with the trailer], uint8."""
        assert self._buffers is not None, "messages outside shared memory have buffers"
        return self._buffers.view(BUFFERS, -1)[number % BUFFERS, : self.sizes[number]]

    @abstractmethod
    def begin(self, number: int) -> list[Transfer]:
        """Start moving the message of this number."""

    def close(self) -> None:
        """Leave the group, which ends all transfers of this process."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    @contextmanager
    def _fail_together(self) -> Iterator[None]:
        """Give the body a deadline; if it fails, tell all members."""
        self._watch.restart()
        try:
            yield
        except BaseException as error:
            # Before `close`: peers of gloo would notice the closed connection, and report it as the failure.
            self._watch.report_failure(f"{SIDE_NAMES[self.side]} {self._rank}: {error}")
            self.close()
            raise

    def _finish(self, number: int, pending: dict[int, list[Transfer]]) -> None:
        try:
            for transfer in pending.pop(number):
                self._wait(transfer)
        except RuntimeError as error:
            first = self._names[self.messages[number][0]["tensor"]]
            verb = "reach" if self.side == "source" else "come from"
            message = f"message {number} of {len(self.messages)}, which begins with {first},"
            raise RuntimeError(f"{message} did not {verb} {self._name_peer(self._peers[number])}: {error}") from error

    def _wait(self, transfer: Transfer) -> None:
        self._watch.wait_until(transfer.is_completed)
        transfer.wait()

    def _name_peer(self, peer: int) -> str:
        return f"{SIDE_NAMES[self.peer_side]} {peer}"

    def _start(self, peer: int, tensor: Tensor, *, sends: bool) -> Transfer:
        if self._group is None:
            raise RuntimeError("the links of this rank failed before and were not made anew")
        start = self._group.send if sends else self._group.recv
        return start([tensor.reshape(-1).view(torch.uint8)], self._find_member(self.peer_side, peer), 0)

    def _open_links(self) -> None:
        """Exchange a first notice over every link, which tests it."""
        for peer in self._list_linked_peers():
            link = [self._rank, peer] if self.side == "source" else [peer, self._rank]
            notice = torch.tensor([*link, 0], device=self._group_device)
            try:
                memory = self._open_link(peer, notice)
            except RuntimeError as error:
                raise RuntimeError(f"no link to {self._name_peer(peer)}: {error}") from error
            if notice[:2].tolist() != link:
                raise RuntimeError(
                    f"the link to {self._name_peer(peer)} connects other ranks: {tuple(notice[:2].tolist())}"
                )
            if memory is not None:
                self._shared[peer] = memory

    def _list_linked_peers(self) -> list[int]:
        return list(dict.fromkeys(self._peers))

    def _move_first(self, peer: int, notice: Tensor, *, sends: bool) -> None:
        """Move the first notice: NCCL connects then, and blocks until the peer does."""
        self._wait(self._watch.call(lambda: self._start(peer, notice, sends=sends)))
