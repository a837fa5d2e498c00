"""Fixtures that several kinds of tests share.

The conftest files import torch and the package within their fixtures: the process that hands tests out to workers
loads these files, waits for that, and needs nothing of it.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from tests.support.nothing_shown import pytest_sessionfinish
from tests.support.rotation import SEED, read_seed, rotate_tests

if TYPE_CHECKING:
    from tests.support.tiny_models import TinyModel

__all__ = ["pytest_sessionfinish"]


def pytest_report_header() -> str:
    """Say which of the tests that take turns run, and how to have the same again."""
    return f"tests that take turns: {SEED}={read_seed()}"


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that take turns to other commits."""
    rotate_tests(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what imports make, meanwhile and afterwards.

    It took a quarter of the time of a collection, and a tenth of the time that a configuration takes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Every tiny model, by name."""
    from tests.support.tiny_models import BUILDERS, make_tiny_model

    folder = tmp_path_factory.mktemp("tiny_models")
    return {name: make_tiny_model(name, folder) for name in BUILDERS}
