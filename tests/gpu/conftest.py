"""Everything here needs CUDA GPUs and says so when there are none, unless a dry run tests it without them."""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.dry import DRY

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest calls this hook with every collected item, those of other folders included.
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE not in item.path.parents:
            continue
        if DRY not in os.environ or item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors of the tests of kernels and losses are."""
    return "cuda" if torch.cuda.is_available() else "cpu"
