"""A whole run that several files of tests compare with, made once; and which tests share a worker of xdist."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.integration.runs import SHORT, TrainingRun


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The six steps of SHORT, without interruption."""
    run = TrainingRun(tmp_path_factory.mktemp("straight") / "run", *SHORT)
    assert run.finish() == 0, run.log()
    run.assert_nothing_left()
    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """With `--dist loadgroup` a worker gets the tests of a file, and one worker all that compare with that run."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            shares = "straight_run" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("straight_run" if shares else item.path.name))
