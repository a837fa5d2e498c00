"""What holds after every test of the sandbox."""

import os
from collections.abc import Iterator

import pytest

from megatron_grpo.environments.sandbox.kernel import list_descendants


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(list_descendants(os.getpid()))
    yield
    assert set(list_descendants(os.getpid())) <= before
