"""Everything here needs a CUDA GPU and says so when there is none, unless it is to be rehearsed without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

HERE = Path(__file__).parent
REHEARSED = "GPU_CHECK_REHEARSED"
"""Environment variable: what can run on a CPU does, kernels in Triton's interpreter."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest calls this hook with every collected item, those of other folders included.
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE not in item.path.parents:
            continue
        if REHEARSED not in os.environ or item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors of the kernels' tests are."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process as the only policy rank, on the first GPU."""
    from megatron_grpo.config.schema import ParallelConfig
    from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel

    initialize_parallel(ParallelConfig(), rank=0, store=HashStore(), seed=1, timeout_s=60)
    yield
    destroy_parallel()
