"""The links between ranks of the policy and of the engines: one group of all of them, and what each has to send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store, Work

from megatron_grpo.refit.buckets import SEAL_BYTES
from megatron_grpo.refit.groups import Group, Rendezvous, join
from megatron_grpo.refit.reshard.plan import PIECE, Pieces
from megatron_grpo.refit.reshard.schedule import Message, messages_of

Side = Literal["source", "target"]
"""source: ranks of the policy; target: ranks of the engines."""


def write_plan(store: Store, scheduled: Pieces, sources: int, targets: int, dtypes: Sequence[str]) -> None:
    """Tell every rank its messages.

    Args:
        store: where the ranks meet.
        scheduled: all pieces, by turn.
        sources: ranks of the policy.
        targets: ranks of all engines.
        dtypes: types of what is sent, by row of the model's table.
    """
    store.set("sources", str(sources))
    store.set("dtypes", " ".join(dtypes))
    _write_messages(store, "source", sources, scheduled)
    _write_messages(store, "target", targets, scheduled)


def _write_messages(store: Store, side: Side, ranks: int, scheduled: Pieces) -> None:
    order = np.argsort(scheduled[side], kind="stable")
    ends = np.cumsum(np.bincount(scheduled[side], minlength=ranks))
    for rank, mine in enumerate(np.split(order, ends[:-1])):
        packed: Any = scheduled[mine].tobytes()  # torch's stubs want a text
        store.set(f"{side}/{rank}", packed)


class Links:
    """One rank's end of all its links.

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
        self.messages = messages_of(np.frombuffer(store.get(f"{side}/{rank}"), dtype=PIECE))
        """The rank's, in the order in which it goes through them."""
        member = rank + (self._sources if side == "target" else 0)
        self._group: Group | None = join(rendezvous, "reshard", member, self._sources + rendezvous.receivers, device)
        largest = max((message.offsets()[-1] for message in self.messages), default=0)
        self._buffers = [torch.empty(largest + SEAL_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._try()

    def buffer(self, number: int) -> Tensor:
        """[bytes of the message and its seal], uint8: the buffer of the rank's message of this number.

        Two messages of which one directly follows the other have different buffers.
        """
        return self._buffers[number % 2][: self.messages[number].offsets()[-1] + SEAL_BYTES]

    def begin(self, number: int) -> Work:
        """Begin to send what is in the buffer of the message of this number, or to receive into it."""
        return self._begin(self.messages[number], self.buffer(number))

    def close(self) -> None:
        """End the rank's membership: whoever waits at the other end of a link is told at once."""
        self._group = None

    def _begin(self, message: Message, buffer: Tensor) -> Work:
        if self._group is None:
            raise RuntimeError("the links of this rank failed before and were not made anew")
        if self._side == "source":
            return self._group.send([buffer], self._sources + message.target, 0)
        return self._group.recv([buffer], message.source, 0)

    def peer(self, message: Message) -> str:
        """Who is at the other end, for a message to people."""
        if self._side == "source":
            return f"generation worker {message.target}"
        return f"policy rank {message.source}"

    def _try(self) -> None:
        """Send a word over every link, so that one which does not work is known now and not in the first refit.

        Raises:
            RuntimeError: a peer did not answer, or is another than the plan says.
        """
        for message in self._first_of_each_link():
            expected = torch.tensor([message.source, message.target], dtype=torch.int64, device=self._device)
            word = expected.clone() if self._side == "source" else torch.zeros_like(expected)
            try:
                self._begin(message, word.view(torch.uint8)).wait()
            except RuntimeError as error:
                raise RuntimeError(f"no link to {self.peer(message)}: {error}") from error
            if not torch.equal(word, expected):
                raise RuntimeError(f"the link to {self.peer(message)} leads elsewhere: {word.tolist()}")

    def _first_of_each_link(self) -> Iterator[Message]:
        known: set[tuple[int, int]] = set()
        for message in self.messages:
            if (message.source, message.target) not in known:
                known.add((message.source, message.target))
                yield message


def views(message: Message, buffer: Tensor, dtypes: Sequence[torch.dtype]) -> Iterator[Tensor]:
    """The pieces of a message in its buffer, each [rows, columns] in its type.

    Args:
        message: whose pieces.
        buffer: [bytes], uint8.
        dtypes: types by row of the model's table.
    """
    for piece, offset in zip(message.pieces, message.offsets(), strict=False):
        rows, columns = piece["rows"][1] - piece["rows"][0], piece["columns"][1] - piece["columns"][0]
        flat = buffer[offset : offset + int(piece["bytes"])].view(dtypes[piece["entry"]])
        yield flat.view(int(rows), int(columns))
