"""Fixtures that several kinds of tests share."""

import gc

import pytest

from tests.support.nothing_shown import pytest_sessionfinish
from tests.support.rotation import SEED, read_seed
from tests.support.tiny_models import BUILDERS, TinyModel, make_tiny_model

__all__ = ["pytest_sessionfinish"]


def pytest_report_header() -> str:
    """Say which cases of layouts run, and how to have the same again."""
    return f"cases of layouts that take turns: {SEED}={read_seed()}"


def pytest_collection_finish() -> None:
    """Spare the garbage collector what imports have made: a tenth of the time that a configuration takes."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Every tiny model, by name."""
    folder = tmp_path_factory.mktemp("tiny_models")
    return {name: make_tiny_model(name, folder) for name in BUILDERS}
