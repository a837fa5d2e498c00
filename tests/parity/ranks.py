"""Running a function on ranks, over gloo on a CPU and over NCCL with one GPU a rank: one body, every layout."""

import atexit
import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils import _pytree as pytree

from megatron_grpo.cluster.allocators import choose_cuda_settings
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.platform.device import connect_store, environment, open_store
from megatron_grpo.trainer.model import build  # noqa: F401  # loaded once by the fork server instead of by every rank
from megatron_grpo.trainer.parallel import destroy_parallel, forbid_tf32, initialize_parallel

SEED = 1234
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Layout:
    """How ranks are laid out."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    count_loss: bool = False

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def parallel(self) -> ParallelConfig:
        """As the configuration says it."""
        return ParallelConfig(**asdict(self))

    def __str__(self) -> str:
        name = f"tp{self.tensor}-pp{self.pipeline}-dp{self.data}"
        return (
            name
            + f"-cp{self.context}" * (self.context > 1)
            + f"-vp{self.virtual_pipeline}" * (self.virtual_pipeline > 1)
            + f"-first{self.first_stage_layers}" * (self.first_stage_layers is not None)
            + f"-last{self.last_stage_layers}" * (self.last_stage_layers is not None)
            + "-loss" * self.count_loss
            + f"-ep{self.expert}" * (self.expert > 1)
            + f"-etp{self.expert_tensor}" * (self.expert_tensor > 1)
            + "-sp" * self.sequence
        )


LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=2, sequence=True),
    Layout(pipeline=2),
    Layout(tensor=2, pipeline=2),
]


def run_on_ranks(layout: Layout, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Call `function(layout, *args)` on every rank of a layout whose process groups are set up.

    Processes are kept for the next call. `function` has to be importable, arguments and results picklable. The test is
    skipped where there are GPUs, but fewer than ranks.

    Returns:
        What each rank returned, by rank, with tensors on the CPU.

    Raises:
        RuntimeError: a rank raised or died; the message holds its traceback.
        TimeoutError: not every rank was done in time; the message names the others.
    """
    gpus = torch.cuda.device_count()
    if 0 < gpus < layout.ranks:
        pytest.skip(f"needs {layout.ranks} GPUs, and this machine has {gpus}")
    return _POOL.run(layout, function, args, timeout_s)


@dataclass
class _Rank:
    process: BaseProcess
    connection: Connection


class _Pool:
    """Rank processes, started when they are first needed; all are ended when one of them fails."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._layout: Layout | None = None
        self._store: TCPStore | None = None

    def run(self, layout: Layout, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        while len(self._ranks) < layout.ranks:
            self._ranks.append(_start(len(self._ranks)))
        port = None
        if layout != self._layout:
            self._layout, self._store = layout, open_store("127.0.0.1", START_TIMEOUT_S)
            port = self._store.port
        request = pickle.dumps((layout, port, function, args))
        for rank in self._ranks[: layout.ranks]:
            rank.connection.send_bytes(request)
        try:
            return self._collect(layout, timeout_s)
        except BaseException:
            self.close()
            raise

    def _collect(self, layout: Layout, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        pending = {rank.connection: number for number, rank in enumerate(self._ranks[: layout.ranks])}
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{layout}: ranks {sorted(pending.values())} were not done after {timeout_s} s")
            for connection in ready:
                number = pending.pop(connection)  # type: ignore[call-overload]  # only connections are waited for
                results[number] = self._receive(layout, number)
        return [results[number] for number in range(layout.ranks)]

    def _receive(self, layout: Layout, number: int) -> Any:
        rank = self._ranks[number]
        try:
            succeeded, value = pickle.loads(rank.connection.recv_bytes())
        except EOFError:
            rank.process.join(5)
            raise RuntimeError(f"{layout}: rank {number} died with exit code {rank.process.exitcode}") from None
        if not succeeded:
            raise RuntimeError(f"{layout}: rank {number} failed\n{value}")
        return value

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks, self._layout = [], None


def _start(number: int) -> _Rank:
    # Read by the fork server, which imports everything once before it forks the ranks.
    os.environ["OMP_NUM_THREADS"] = "1"
    # CUDA does not survive a fork, and a rank on CUDA sees its own GPU alone, which it learns before it imports torch.
    cuda = torch.cuda.is_available()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number + 1)))).split(",")
    context: Any = multiprocessing.get_context("spawn" if cuda else "forkserver")
    if not cuda:
        # What the functions of tests import costs seconds, and every file has ranks of its own.
        folder = Path(__file__).parent
        context.set_forkserver_preload(
            [__name__, *(f"tests.parity.{file.stem}" for file in sorted(folder.glob("test_*.py")))]
        )
    ours, theirs = context.Pipe()
    # Not a daemon: the checkpoint writer starts processes of its own. A rank ends when its connection does.
    process = context.Process(target=_serve, args=(number, theirs))
    variables = {"CUDA_VISIBLE_DEVICES": visible[number], "PYTORCH_ALLOC_CONF": choose_cuda_settings()} if cuda else {}
    with environment(**variables):
        process.start()
    theirs.close()
    return _Rank(process, ours)


def _serve(number: int, connection: Connection) -> None:
    """A rank: take requests until the parent is gone."""
    gc.freeze()  # spares the garbage collector what the fork server has imported
    torch.set_num_threads(1)
    forbid_tf32()
    while True:
        try:
            layout, port, function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if port is not None:
                destroy_parallel()
                initialize_parallel(
                    layout.parallel,
                    rank=number,
                    store=connect_store("127.0.0.1", port, START_TIMEOUT_S),
                    seed=SEED,
                    timeout_s=START_TIMEOUT_S,
                )
            answer = (True, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, function(layout, *args)))
        except BaseException:  # noqa: BLE001  # whatever a test raises is reported to it
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def end_ranks() -> None:
    """End the processes of ranks; the next call starts others."""
    _POOL.close()


_POOL = _Pool()
atexit.register(_POOL.close)
