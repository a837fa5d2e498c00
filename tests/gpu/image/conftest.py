"""What needs the whole image: Ray, vLLM, Transformer Engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_rollouts import fake_ray

__all__ = ["fake_ray"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
