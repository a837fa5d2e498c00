"""A whole run that several files compare with, made once; which files share a worker of xdist, and their order."""

from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import SHORT, TrainingRun
from tests.support.durations import read_durations
from tests.support.rotation import rotate_files

SHARING = ("test_colocated_run.py", "test_debug_modes.py", "test_evaluate.py", "test_restarts.py", "test_run.py")
"""Files with tests that compare with the straight run."""
IN_TURNS = (
    ("test_new_run.py", "test_user_family.py", "test_user_formulas.py"),
    ("test_adapter_refit.py", "test_canary.py", "test_generation_images.py", "test_refit_faults.py", "test_reshard.py"),
    ("test_scripted_run.py", "test_turns.py", "test_tutorial.py"),
    ("test_async_run.py", "test_evaluate.py", "test_restarts.py"),
)
"""Rows of files of which each commit runs one: whole runs, or engines that start."""
STRAIGHT_RUN = "straight_run"
"""What is handed out in place of these files."""
LONG_S = 60.0


@pytest.fixture(scope="session")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The six steps of SHORT, without interruption."""
    run = TrainingRun(tmp_path_factory.mktemp("straight") / "run", *SHORT)
    assert run.finish() == 0, run.log()
    run.assert_nothing_left()
    return run


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave files that take turns to other commits, and put the longest files first for even ends.

    A file of this folder, which waits for processes to start, is followed by one of the others, which compute. Files
    without a duration count as long: they are new, or run with `.ci/run` alone.
    """
    rotate_files(items, IN_TURNS)
    seconds = read_durations()
    files = sorted({get_file(item) for item in items}, key=lambda file: (-seconds.get(file, LONG_S), file))
    waiting = [file for file in files if is_of_this_folder(file)]
    pairs = zip_longest(waiting, (file for file in files if file not in waiting))
    order = {file: number for number, file in enumerate(chain.from_iterable(pairs))}
    items.sort(key=lambda item: order[get_file(item)])


def is_of_this_folder(file: str) -> bool:
    """Tell files, and the files that share a run, from those of other folders."""
    return file == STRAIGHT_RUN or Path(file).parent.name == "integration"


def get_file(item: pytest.Item) -> str:
    """Name a test's file from the root of the repository."""
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one worker all files that compare with that run, with `--dist loadfile`, so that it is made once.

    While two workers have a file of this folder, whose processes hold gigabytes, others get those of other folders.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return STRAIGHT_RUN if Path(file).name in SHARING else file

        def _assign_work_unit(self, node: Any) -> None:
            pending = [file for work in self.assigned_work.values() for file in work if not all(work[file].values())]
            if sum(map(is_of_this_folder, pending)) >= 2:
                computing = (file for file in self.workqueue if not is_of_this_folder(file))
                self.workqueue.move_to_end(next(computing, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    return Together(config, log)
