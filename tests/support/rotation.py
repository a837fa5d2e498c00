"""Dear tests take turns: each commit runs a part of them, and `make test-slow` the rest.

Layouts of a test mostly fail together, and so do the cases of a table: a fault that a commit's part does not see is
seen by a later commit's. What is left to other commits has the mark `later`.
"""

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")
SEED = "TEST_ROTATION"
"""Environment variable that chooses the cases in place of the commit."""
LAYOUT = ("layout", "layouts")
"""Parameters whose values take turns."""
TURNS = "turns"
"""Mark `turns(share)`: of a file's tests with it, each commit runs one in `share`."""
LATER = "later"
"""Mark of tests whose turn it is not."""


@cache
def read_seed() -> str:
    """Read the variable, or the commit of the checkout; outside of one the same half runs always."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    except OSError:  # no git
        commit = ""
    return os.environ.get(SEED) or commit.strip() or "0"


def choose_part(name: str, cases: Sequence[T], count: int) -> list[T]:
    """Choose a commit's cases of a test: `count` neighbours, with the last case before the first."""
    first = crc32(f"{read_seed()} {name}".encode()) % len(cases)
    return [cases[(first + number) % len(cases)] for number in range(count)]


def leave_to_others(name: str, items: Sequence[pytest.Item], share: int) -> None:
    """Mark all but a commit's part of the items, which is one in `share` of them, rounded up."""
    chosen = choose_part(name, items, ceil(len(items) / share))
    for item in items:
        if item not in chosen:
            item.add_marker(LATER)


def rotate_layouts(items: Iterable[pytest.Item]) -> None:
    """Leave half of each test's layouts to other commits; the cases differ in nothing but the layout."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow") or not hasattr(item, "callspec"):
            continue
        if any(name in item.callspec.params for name in LAYOUT):
            values = sorted((name, str(value)) for name, value in item.callspec.indices.items() if name not in LAYOUT)
            tests[f"{item.nodeid.partition('[')[0]} {values}"].append(item)
    for name, cases in tests.items():
        leave_to_others(name, cases, 2)


def rotate_tests(items: Iterable[pytest.Item]) -> None:
    """Leave tests with the mark `turns` to other commits, but for one in `share` of each file."""
    files: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker(TURNS)
        if mark and not is_rare(item):
            files[item.nodeid.partition("::")[0], mark.args[0]].append(item)
    for (name, share), tests in files.items():
        leave_to_others(name, tests, share)


def rotate_files(items: Iterable[pytest.Item], rows: Iterable[Sequence[str]]) -> None:
    """Leave all tests of all files of a row but one to other commits."""
    turn = {name: choose_part(row[0], row, 1)[0] for row in rows for name in row}
    for item in items:
        name = item.path.name
        if turn.get(name, name) != name:
            item.add_marker(LATER)


def is_rare(item: pytest.Item) -> bool:
    """Tell what `make test-slow` alone runs."""
    return item.get_closest_marker("slow") is not None and item.get_closest_marker("ci") is None
