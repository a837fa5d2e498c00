"""A whole run that several files of tests compare with, made once."""

from __future__ import annotations

import pytest

from tests.integration.runs import SHORT, TrainingRun


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The six steps of SHORT, without interruption."""
    run = TrainingRun(tmp_path_factory.mktemp("straight") / "run", *SHORT)
    assert run.finish() == 0, run.log()
    run.assert_nothing_left()
    return run
