"""Cases of a layout take turns: each commit runs half of them, and `make test-slow` the other half.

A test of several layouts fails in most of them when it fails in one, so a fault that a commit's half does not see is
seen by one of the next commits.
"""

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
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
"""Mark of tests that take turns with those of the same file: each commit runs one of them."""


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


def set_others_aside(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases that are not this commit's; those of one test differ in nothing but the layout."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("slow") or not hasattr(item, "callspec"):
            continue
        if any(name in item.callspec.params for name in LAYOUT):
            values = sorted((name, str(value)) for name, value in item.callspec.indices.items() if name not in LAYOUT)
            tests[f"{item.nodeid.partition('[')[0]} {values}"].append(item)
    for name, cases in tests.items():
        chosen = choose_part(name, cases, (len(cases) + 1) // 2)
        for case in cases:
            if case not in chosen:
                case.add_marker(pytest.mark.slow)


def set_tests_aside(items: Iterable[pytest.Item]) -> None:
    """Mark as slow, of each file's tests that take turns, all but this commit's, which `.ci/run` runs as well."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(TURNS) and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("::")[0]].append(item)
    for name, cases in tests.items():
        chosen = choose_part(name, cases, 1)
        for case in cases:
            if case not in chosen:
                case.add_marker(pytest.mark.slow)
                case.add_marker(pytest.mark.ci)
