"""Parity tests compute what they compare with in one thread, which is faster on their small tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.parity.ranks import end_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> Iterator[None]:
    """Give each file ranks of its own.

    A process keeps the threads of every process group that it has had. Over all files they were 600, and some tests
    took nine times as long.
    """
    yield
    end_ranks()
