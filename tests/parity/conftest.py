"""Parity tests compute what they compare with in one thread, which is faster on their small tensors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity.ranks import end_ranks
from tests.support.rotation import set_others_aside

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave half of the layouts of each test to other commits."""
    set_others_aside(item for item in items if item.path.parent == Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> Iterator[None]:
    """Give each file ranks of its own.

    A process keeps the threads of every process group that it has had. Over all files they were 600, and some tests
    took nine times as long.
    """
    yield
    end_ranks()
