"""One thread of torch, ranks of its own for each file, and half of the layouts for each commit."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rotation import rotate_layouts


def pytest_collection_finish() -> None:
    """Compute what ranks are compared with in one thread, which is faster on small tensors."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave half of the layouts of each test to other commits."""
    rotate_layouts(item for item in items if item.path.parent == Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> Iterator[None]:
    """Give each file ranks of its own.

    A process keeps the threads of every process group that it has had. Over all files they were 600, and some tests
    took nine times as long.
    """
    yield
    from tests.parity.ranks import end_ranks

    end_ranks()
