"""A process group on CPUs that fails as NCCL's does, to be used in place of gloo's.

- Nobody is told that a peer has ended or has aborted: a transfer with it stays pending, for ever.
- All transfers of a process go one after the other, as through one stream.
- A send is complete only when its receive is.
- The first transfer between two members connects them, and blocks its caller until the other one does the same.
- An abort ends the calls of its own process that block, and nothing else. A pending transfer never completes.
- wait() is for complete transfers. On another it is a mistake, which with NCCL might block for ever.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from megatron_grpo.weight_sync import links
from megatron_grpo.weight_sync.refit_group import Rendezvous

_LENGTH_BYTES = 8
_READY, _RECEIVED = b"\1", b"\2"
HOST = "127.0.0.1"


def install() -> None:
    """Let links of this process that are made from now on use this group."""
    links.join_group = join


def join(rendezvous: Rendezvous, rank: int, size: int, device: torch.device, name: str = "group") -> "NcclLikeGroup":
    """In place of `refit_group.join_group`."""
    assert device.type == "cpu"
    return NcclLikeGroup(PrefixStore(name, rendezvous.connect()), rank, size)


class NcclLikeTransfer:
    """A transfer that completes when it has succeeded."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.is_completed = self._done.is_set
        self.complete = self._done.set

    def wait(self) -> None:
        """Return at once."""
        assert self.is_completed(), "waited for a transfer that may never complete"


class NcclLikeGroup:
    """One member; made when all members have come. Members find each other through the store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._rank, self._store, self._aborted = rank, store, threading.Event()
        self._listener = socket.create_server((HOST, 0), backlog=size)
        self._sockets: dict[tuple[int, bool], socket.socket] = {}
        """Connections by peer and whether this process sends through it."""
        self._arrived, self._ready_for = threading.Condition(), set[int]()
        self._queue: SimpleQueue[tuple[Callable[[], None], NcclLikeTransfer]] = SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._stream, daemon=True).start()
        store.set(f"nccl/{rank}", str(self._listener.getsockname()[1]))
        store.wait([f"nccl/{peer}" for peer in range(size)])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> NcclLikeTransfer:
        """Start sending one tensor to a member; the first time this blocks until it starts receiving."""
        [tensor], link = tensors, self._connected(peer)
        data = memoryview(tensor.numpy())

        def move() -> None:
            link.sendall(len(data).to_bytes(_LENGTH_BYTES, "big"))
            link.sendall(data)
            _expect(link, _RECEIVED)

        return self._started(move)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> NcclLikeTransfer:
        """Start receiving one tensor from a member; the first time this blocks until it starts sending."""
        [tensor], link = tensors, self._accepted(peer)
        data = memoryview(tensor.numpy())

        def move() -> None:
            length = int.from_bytes(_read(link, bytearray(_LENGTH_BYTES)), "big")
            assert length == len(data), f"{length} bytes came, and {len(data)} are expected"
            _read(link, data)
            link.sendall(_RECEIVED)

        return self._started(move)

    def abort(self) -> None:
        """End calls of this process that block. Peers that notice go on waiting all the same."""
        self._aborted.set()
        for connection in (self._listener, *self._sockets.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends calls of other threads, which close() does not
            connection.close()
        with self._arrived:
            self._arrived.notify_all()

    def _started(self, move: Callable[[], None]) -> NcclLikeTransfer:
        transfer = NcclLikeTransfer()
        self._queue.put((move, transfer))
        return transfer

    def _stream(self) -> None:
        while True:
            move, transfer = self._queue.get()
            try:
                move()
            except OSError:
                return  # the peer is gone or this process has aborted; transfers behind this one never begin
            transfer.complete()

    def _connected(self, peer: int) -> socket.socket:
        """The connection to a peer that receives."""
        if (peer, True) not in self._sockets:
            with self._blocked():
                link = socket.create_connection((HOST, int(self._store.get(f"nccl/{peer}"))))
                self._sockets[peer, True] = link
                link.sendall(self._rank.to_bytes(_LENGTH_BYTES, "big"))
                _expect(link, _READY)
        return self._sockets[peer, True]

    def _accepted(self, peer: int) -> socket.socket:
        """The connection from a peer that sends."""
        if peer not in self._ready_for:
            with self._blocked():
                with self._arrived:
                    self._arrived.wait_for(lambda: (peer, False) in self._sockets or self._aborted.is_set())
                self._sockets[peer, False].sendall(_READY)
                self._ready_for.add(peer)
        return self._sockets[peer, False]

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        """A call that does not end when its peer has: it ends with an abort alone."""
        try:
            yield
        except (OSError, KeyError):
            self._aborted.wait()
            raise RuntimeError("aborted") from None

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            peer = int.from_bytes(_read(link, bytearray(_LENGTH_BYTES)), "big")
            with self._arrived:
                self._sockets[peer, False] = link
                self._arrived.notify_all()


def _read(link: socket.socket, into: Any) -> Any:
    """Fill a buffer; OSError if the peer is gone."""
    view, begin = memoryview(into), 0
    while begin < len(view):
        count = link.recv_into(view[begin:])
        if not count:
            raise ConnectionResetError
        begin += count
    return into


def _expect(link: socket.socket, answer: bytes) -> None:
    assert bytes(_read(link, bytearray(1))) == answer
