"""The processes of a layout on this machine, over gloo: started, waited for with a deadline, ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from megatron_grpo.config.errors import RunError
from megatron_grpo.verification.on_rank import Findings, Task, measure

PHASE, FOUND, FAILED = "phase", "found", "failed"
"""What a rank's message is: what it does now, what it has found, a traceback."""
JOIN_S = 5.0
"""Time that the exit code of a rank which is gone may take to be known."""


def run_layout(task: Task) -> list[Findings]:
    """What each rank of a layout finds, by rank.

    Raises:
        RunError: a rank failed or died, or not all were done in time; names them.
    """
    from megatron_grpo.cluster.rendezvous import open_store

    world = task.parallel.world_size
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
    os.environ["PYTHONWARNINGS"] = "ignore"  # of packages, about themselves, once for every rank
    store = open_store("127.0.0.1", task.timeout_s)
    # A server that has imported everything forks the ranks: importing takes longer than measuring a small model.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "megatron_grpo.verification.problem"])
    processes: list[ForkServerProcess] = []
    connections: list[Connection] = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(task, rank, store.port, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    try:
        return _collect(processes, connections, task.timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(
    processes: Sequence[ForkServerProcess], connections: Sequence[Connection], timeout_s: float
) -> list[Findings]:
    end = time.monotonic() + timeout_s
    phases = ["start"] * len(connections)
    found: dict[int, Findings] = {}
    while len(found) < len(connections):
        pending = [one for rank, one in enumerate(connections) if rank not in found]
        ready = wait(pending, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = ", ".join(f"{rank} (in {phases[rank]})" for rank, one in enumerate(connections) if one in pending)
            raise RunError(f"rank(s) {late} were not done within timeout_s={timeout_s:g} s")
        for connection in ready:
            rank = next(number for number, one in enumerate(connections) if one is connection)
            try:
                kind, answer = pickle.loads(connections[rank].recv_bytes())
            except EOFError:
                processes[rank].join(JOIN_S)
                code = processes[rank].exitcode
                raise RunError(f"rank {rank} died in {phases[rank]}, with exit code {code}") from None
            if kind == FAILED:
                raise RunError(f"rank {rank} failed in {phases[rank]}:\n{answer}")
            if kind == PHASE:
                phases[rank] = answer
            else:
                found[rank] = answer
    return [found[rank] for rank in range(len(connections))]


def _serve(task: Task, rank: int, port: int, connection: Connection) -> None:
    """A rank: measure once, say what it is about to do, and answer with what was found or with a traceback."""
    import torch

    from megatron_grpo.cluster.rendezvous import reach_store
    from megatron_grpo.policy.rank.parallel import initialize_parallel

    def tell(kind: str, what: object) -> None:
        connection.send_bytes(pickle.dumps((kind, what)))

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        initialize_parallel(
            task.parallel,
            rank=rank,
            world_size=task.parallel.world_size,
            store=reach_store("127.0.0.1", port, task.timeout_s),
            seed=task.seed,
            timeout_s=task.timeout_s,
        )
        tell(FOUND, measure(task, lambda phase: tell(PHASE, phase)))
    except Exception:  # noqa: BLE001 - whatever a rank raises is told to the user, who chose the layout
        tell(FAILED, traceback.format_exc())
