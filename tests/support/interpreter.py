"""Calling functions where Triton interprets its kernels, which it decides when it is imported."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

TIMEOUT_S = 300.0


def run_interpreted(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process with TRITON_INTERPRET=1, kept for the next call.

    Args:
        function: importable, as are the types of its arguments and its result.
    """
    return _pool().submit(function, *arguments).result(TIMEOUT_S)


def interpreted_on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of at most two such processes, which run at the same time."""
    assert ranks <= 2
    calls = [_pool().submit(function, rank, *arguments) for rank in range(ranks)]
    return [call.result(TIMEOUT_S) for call in calls]


@cache
def _pool() -> ProcessPoolExecutor:
    """Processes that start when they are first needed, and end with this one."""
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=_interpret)
    atexit.register(pool.shutdown, cancel_futures=True)
    return pool


def _interpret() -> None:
    assert "triton" not in sys.modules, "Triton was imported before it could be told to interpret"
    os.environ["TRITON_INTERPRET"] = "1"
