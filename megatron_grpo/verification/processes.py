"""Runs a function on every rank of a layout, as processes on this machine: over gloo, or with a GPU each over NCCL."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.multiprocessing import ProcessContext, ProcessExitedException, ProcessRaisedException, start_processes

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.paths import read_family_environment, set_family_environment
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.platform.device import connect_store, environment, open_store
from megatron_grpo.trainer.parallel import forbid_tf32, initialize_parallel

T = TypeVar("T")
Enter = Callable[[str], object]
"""A function that a rank calls with the name of each phase when the phase begins; messages name it."""
Body = Callable[[T, Enter], dict[str, Any]]
"""The work of a rank: from the task and `Enter` to named results, which torch.load reads with weights_only."""


def run_on_ranks(
    body: Body[T], task: T, parallel: ParallelConfig, *, seed: int, timeout_s: float, gpus: int | None = None
) -> list[dict[str, Any]]:
    """Call `body(task, enter)` on every rank; return the results by rank.

    Process groups exist when `body` begins.

    Args:
        body: a function of a module, which processes can import.
        task: the argument, which can be pickled.
        parallel: the layout.
        seed: seed of the ranks' random states.
        timeout_s: deadline of the whole call.
        gpus: GPUs of this machine, one for each rank; 0: the ranks compute on the CPU; None: every rank sees the
            devices that this process sees.

    Raises:
        RunError: a rank failed, died or missed the deadline, which the text names; or there are fewer GPUs than ranks.
    """
    world = parallel.world_size
    if gpus and gpus < world:
        raise RunError(f"the layout has {world} ranks, and this machine {gpus} GPUs")
    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, (os.cpu_count() or 1) // world)
    # After a failure torch ends the other ranks, and would log each of them.
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
    store, deadline = open_store("127.0.0.1", timeout_s), time.monotonic() + timeout_s
    # The ranks are forked from a server that has imported everything, because imports take longer than computing.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, body.__module__])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        family_variables = read_family_environment()
        arguments = (body, task, parallel, seed, timeout_s, gpus, threads, store.port, folder, family_variables)
        # Ranks do not import from the working folder, nor does each of them repeat the warnings of packages.
        with environment(PYTHONSAFEPATH="1", PYTHONWARNINGS="ignore"):
            ranks = start_processes(_run_rank, arguments, world, join=False, daemon=True, start_method="forkserver")
        _wait_for_ranks(ranks, folder, deadline, timeout_s)
        return [torch.load(folder / f"{rank}.results", weights_only=True) for rank in range(world)]


def _wait_for_ranks(ranks: ProcessContext, folder: Path, deadline: float, timeout_s: float) -> None:
    """Wait until every rank has ended, and leave no process behind."""
    try:
        while not ranks.join(max(0.0, deadline - time.monotonic()), grace_period=0.0):
            if time.monotonic() >= deadline:
                pending = ranks.sentinels.values()
                overdue = ", ".join(f"{rank} (in {_read_phase(folder, rank)})" for rank in sorted(pending))
                raise RunError(f"rank(s) {overdue} were not done within timeout_s={timeout_s:g} s")
    except ProcessRaisedException as error:
        rank, text = error.error_index, error.msg.partition("following error:\n")[2]
        raise RunError(f"rank {rank} failed in {_read_phase(folder, rank)}:\n{text}") from None
    except ProcessExitedException as error:
        rank, code = error.error_index, error.exit_code
        raise RunError(f"rank {rank} died in {_read_phase(folder, rank)}, with exit code {code}") from None
    finally:
        # All are killed before the first is waited for: a rank in a collective ends only with its peers.
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join()


def _read_phase(folder: Path, rank: int) -> str:
    file = folder / f"{rank}.phase"
    return file.read_text() if file.exists() else "start"


def _run_rank(
    rank: int,
    body: Body[T],
    task: T,
    parallel: ParallelConfig,
    seed: int,
    timeout_s: float,
    gpus: int | None,
    threads: int,
    port: int,
    folder: Path,
    family_variables: dict[str, str],
) -> None:
    """Run a rank's process; it writes phase and results to the folder."""
    set_family_environment(family_variables)
    # Before CUDA starts in this process, which then sees one GPU, or none.
    if gpus is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = visible.split(",") if visible else [str(number) for number in range(parallel.world_size)]
        os.environ["CUDA_VISIBLE_DEVICES"] = numbers[rank] if gpus else ""
    forbid_tf32()
    torch.set_num_threads(threads)  # otherwise every rank would take all cores
    store = connect_store("127.0.0.1", port, timeout_s)
    initialize_parallel(parallel, rank=rank, store=store, seed=seed, timeout_s=timeout_s)
    result = body(task, (folder / f"{rank}.phase").write_text)
    torch.save(result, folder / f"{rank}.results")
