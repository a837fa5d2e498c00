"""Where the members of a process group meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A store that listens on this address alone, on a free port; it lives as long as the returned object."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
        timeout=timedelta(seconds=timeout_s),
    )


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of the store at this address."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
