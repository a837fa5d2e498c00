"""Everything here needs a CUDA GPU and says so when there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore

from tests.support.fake_rollouts import fake_ray

__all__ = ["fake_ray"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process as the only policy rank, on the first GPU."""
    from megatron_grpo.config.schema import ParallelConfig
    from megatron_grpo.policy.rank.parallel import destroy_parallel, initialize_parallel

    initialize_parallel(ParallelConfig(), rank=0, world_size=1, store=HashStore(), seed=1, timeout_s=60)
    yield
    destroy_parallel()
