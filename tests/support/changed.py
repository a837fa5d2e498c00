"""A pytest plugin: only files of tests that a change can reach; `make test CHANGED=1`.

The change is the working tree against HEAD, or against another revision that CHANGED names. A file reaches what it
imports, at any depth, and modules whose dotted names it writes as text, such as those that it starts with `-m` or that
a table resolves. A file that is not Python is reached by what writes its name, or its folder as a path of its own; a
change of what all tests share runs them all.
"""

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_grpo", "kernels/megatron_grpo_kernels", "tests", "benchmarks")
SHARED = ("pyproject.toml", "setup.py", "Makefile", "requirements/")
"""What every test depends on, beside the conftest files above it."""
_DOTTED = re.compile(r"\b(?:megatron_grpo|megatron_grpo_kernels|tests)(?:\.\w+)+")


def list_changed_files(revision: str) -> set[str]:
    """List files that differ from a revision, those that git does not know yet included."""
    commands = [["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"]]
    texts = [
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True) for command in commands
    ]
    return {line for text in texts for line in text.stdout.splitlines()}


def name_module(file: str) -> str:
    """Name a file as an import does: kernels/ holds a package of its own, conf/ one of YAML files."""
    path = Path(file).with_suffix("") if file.endswith(".py") else Path(file).parent
    name = ".".join(part for part in path.parts if part not in ("kernels", "__init__"))
    return "megatron_grpo.conf" if name.partition(".")[0] == "conf" else name


@cache
def read_file(file: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Read the modules that a Python file imports, and its texts."""
    modules: set[str] = set()
    texts = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return frozenset(modules), tuple(texts)


@cache
def list_modules(file: Path) -> frozenset[str]:
    """List the modules that a file reaches by itself; a test reaches those that it names for a process."""
    modules, texts = read_file(file)
    if not file.is_relative_to(ROOT / "tests"):
        return modules
    return modules.union(*(_DOTTED.findall(text) for text in texts))


class Change:
    """What a change reaches."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self._is_shared = any(file.startswith(SHARED) for file in files)
        other_files = [Path(file) for file in files if not file.endswith(".py")]
        self._words = {Path(file).stem for file in files} - {"__init__"}
        self._other_words = {file.stem for file in other_files}
        self._folders = {folder for file in other_files for folder in file.parts[:-1]}
        paths = {path: name_module(str(path.relative_to(ROOT))) for f in FOLDERS for path in (ROOT / f).rglob("*.py")}
        pending = {name_module(file) for file in files if file.endswith(".py")}
        packages = {name_module(file) for file in files if file.endswith("/__init__.py")}
        pending |= {name for name in paths.values() if name.startswith(tuple(f"{package}." for package in packages))}
        pending |= {name for path, name in paths.items() if self._writes_name(path)}
        self._modules: set[str] = set()
        while pending:  # modules that reach these, until no more are added
            self._modules |= pending
            pending = {
                name
                for path, name in paths.items()
                if name not in self._modules and not pending.isdisjoint(list_modules(path))
            }

    def _writes_name(self, path: Path) -> bool:
        """Tell whether a file writes the name of a changed file, or its folder as a path.

        The package's start names conf/ only to find itself; every module imports it.
        """
        if path == ROOT / "megatron_grpo" / "__init__.py":
            return False
        words = self._words if path.is_relative_to(ROOT / "tests") else self._other_words
        return any(
            Path(text).stem in words
            or text.strip("/") in self._folders
            or (text.endswith(".conf") and "conf" in self._folders)
            for text in read_file(path)[1]
        )

    def reaches(self, file: Path) -> bool:
        """Tell whether a file of tests can notice the change."""
        folders = file.relative_to(ROOT).parents
        is_shared = self._is_shared or any(f"{folder}/conftest.py" in self._files for folder in folders)
        return is_shared or name_module(str(file.relative_to(ROOT))) in self._modules


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
