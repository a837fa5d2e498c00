"""A pytest plugin: only files of tests that a change can reach by imports; `make test CHANGED=1`.

The change is the working tree against HEAD, or against another revision that CHANGED names. A file of tests is reached
by what it imports, at any depth, and by modules whose dotted names it writes as text, such as those that it starts with
`-m`. What is not Python (conf/, docs/, launchers) is reached by tests that name its folder; a change of what all tests
share runs them all.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("megatron_grpo", "megatron_grpo_kernels")
SHARED = ("pyproject.toml", "setup.py", "Makefile", "requirements/", "tests/conftest.py")
"""What every test depends on."""


def list_changed_files(revision: str) -> set[str]:
    """List files that differ from a revision, those that git does not know yet included."""
    commands = [["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"]]
    texts = [
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True) for command in commands
    ]
    return {line for text in texts for line in text.stdout.splitlines()}


def name_module(file: str) -> str:
    """Name a Python file as an import does; kernels/ holds a package of its own."""
    parts = Path(file).with_suffix("").parts
    return (
        ".".join(part for part in parts if part not in ("kernels", "__init__"))
        if parts[0] == "kernels"
        else ".".join(part for part in parts if part != "__init__")
    )


@cache
def read_names(file: Path) -> frozenset[str]:
    """Read the modules that a file imports or names as text, of the package and of the tests."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"\b(?:megatron_grpo|megatron_grpo_kernels|tests)(?:\.\w+)+", node.value))
    return frozenset(name for name in names if name.startswith((*PACKAGES, "tests.")))


class Change:
    """What a change reaches."""

    def __init__(self, files: set[str]) -> None:
        self.files = files
        self.is_shared = any(file.startswith(SHARED) for file in files)
        self.folders = {file.partition("/")[0] for file in files if not file.endswith(".py")} - {"tests", "benchmarks"}
        graph = grimp.build_graph(*PACKAGES)
        changed = {name_module(file) for file in files if file.endswith(".py")}
        self.modules = changed.union(*(graph.find_downstream_modules(name) for name in changed & graph.modules))

    def reaches(self, file: Path) -> bool:
        """Tell whether a file of tests can notice the change."""
        conftest = str((file.parent / "conftest.py").relative_to(ROOT))
        if self.is_shared or conftest in self.files:
            return True
        pending, visited = [file], set()
        while pending:
            current = pending.pop()
            visited.add(current)
            names = read_names(current)
            if str(current.relative_to(ROOT)) in self.files or names & self.modules:
                return True
            text = current.read_text()
            if any(re.search(rf"\b{re.escape(folder)}\b", text) for folder in self.folders):
                return True
            helpers = (ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests."))
            pending += [helper for helper in helpers if helper.is_file() and helper not in visited]
        return False


@cache
def read_change() -> Change:
    """Read the change that the variable names, once a process."""
    revision = os.environ["CHANGED"]
    return Change(list_changed_files("HEAD" if revision == "1" else revision))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files of tests that the change does not reach."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and not read_change().reaches(collection_path) else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A change that reaches no test of a folder is no failure."""
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
