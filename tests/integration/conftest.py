"""A whole run that several files compare with, made once; which files share a worker of xdist, and their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import SHORT, TrainingRun
from tests.support.durations import read_durations

SHARING = ("test_colocated_run.py", "test_debug_modes.py", "test_evaluate.py", "test_run.py")
"""Files with tests that compare with the straight run."""


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The six steps of SHORT, without interruption."""
    run = TrainingRun(tmp_path_factory.mktemp("straight") / "run", *SHORT)
    assert run.finish() == 0, run.log()
    run.assert_nothing_left()
    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker is left with one of them at the end."""
    seconds = read_durations()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` one worker gets all files that compare with that run, so that it is made once."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "straight_run" if Path(file).name in SHARING else file

    return Together(config, log)
