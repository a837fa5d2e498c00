"""A whole run that several files compare with, made once; which files share a worker of xdist, and their order."""

from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import SHORT, TrainingRun
from tests.support.durations import read_durations
from tests.support.rotation import set_tests_aside

SHARING = ("test_colocated_run.py", "test_debug_modes.py", "test_evaluate.py", "test_run.py")
"""Files with tests that compare with the straight run."""


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The six steps of SHORT, without interruption."""
    run = TrainingRun(tmp_path_factory.mktemp("straight") / "run", *SHORT)
    assert run.finish() == 0, run.log()
    run.assert_nothing_left()
    return run


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that take turns to other commits, and put the longest files first for even ends.

    A file of this folder, which waits for processes to start, is followed by one of the others, which compute.
    """
    set_tests_aside(items)
    seconds = read_durations()
    files = sorted({get_file(item) for item in items}, key=lambda file: (-seconds.get(file, 0.0), file))
    waiting = [file for file in files if Path(file).parent.name == "integration"]
    pairs = zip_longest(waiting, (file for file in files if file not in waiting))
    order = {file: number for number, file in enumerate(chain.from_iterable(pairs))}
    items.sort(key=lambda item: order[get_file(item)])


def get_file(item: pytest.Item) -> str:
    """Name a test's file from the root of the repository."""
    return item.nodeid.partition("::")[0]


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
