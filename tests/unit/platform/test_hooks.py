"""The registry of hooks into third-party libraries: its rows exist, and every hook in the package has a row."""

import ast
import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.platform import hooks as registry
from megatron_grpo.platform.hooks import LIBRARIES, Hook, check_hooks, find_untried_versions, load_hooks

ROOT = Path(__file__).parents[3]
OWN_METHODS = {"_convert", "_replace", "_fields", "_link_", "_mark_", "_number_"}
"""Private names that classes of this package have from each other, and the public ones of named tuples."""


def third_party_names(tree: ast.AST) -> set[str]:
    """Names in a file that stand for a hooked library, or something in it."""
    roots = {library.package.partition(".")[0] for library in LIBRARIES.values()}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (name.asname or name.name).split(".")[0] for name in node.names if name.name.split(".")[0] in roots
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in roots:
            names |= {name.asname or name.name for name in node.names}
    return names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def used_hooks(tree: ast.AST) -> Iterator[str]:
    """Last names of private attributes of others, of private imports, and of attributes of libraries that are set."""
    libraries = third_party_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("megatron_grpo"):
            yield from (name.name for name in node.names if is_private(name.name))
        if not isinstance(node, ast.Attribute):
            continue
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        of_library = isinstance(root, ast.Name) and root.id in libraries
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
        if (is_private(node.attr) and not is_own) or (of_library and isinstance(node.ctx, ast.Store)):
            yield node.attr


def test_rows_of_installed_libraries_are_there() -> None:
    missing = []
    for hook in load_hooks():
        if LIBRARIES[hook.library].find_installed() is None:
            continue
        try:
            importlib.import_module(hook.module)
        except ImportError as error:
            missing.append(f"{hook.module}: {error}")
        else:
            missing += [f"{hook.module}:{'.'.join(hook.names)}"] if hook.is_missing() else []
    assert not missing
    check_hooks("cpu")
    check_hooks("cuda")
    assert not list(find_untried_versions())


def test_every_hook_of_the_package_has_a_row() -> None:
    rows = {name for hook in load_hooks() for name in hook.names}
    without = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in [*ROOT.glob("megatron_grpo/**/*.py"), *ROOT.glob("kernels/**/*.py")]
        for name in used_hooks(ast.parse(file.read_text()))
        if name not in rows | OWN_METHODS
    }
    assert not without, "give these a row in platform/hooks.yaml"


def test_every_row_is_used() -> None:
    text = "".join(file.read_text() for file in ROOT.glob("megatron_grpo/**/*.py"))
    assert not [hook for hook in load_hooks() if hook.names[-1] not in text]


@pytest.mark.parametrize(
    ("module", "names", "missing"),
    [
        ("made_up", ("there",), False),
        ("made_up", ("Kind", "inside"), False),
        ("made_up", ("gone",), True),
        ("made_up", ("Kind", "gone"), True),
        ("made_up.sub", ("not_imported",), False),
        ("made_up.lost", ("not_imported",), True),
    ],
)
def test_a_missing_symbol_is_one_clear_error(
    module: str, names: tuple[str, ...], missing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").write_text("there = 1\nclass Kind:\n    inside = 1\n")
    (tmp_path / "made_up" / "sub.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    del sys.modules["made_up"]
    monkeypatch.setitem(LIBRARIES, "made-up", registry.Library("made_up", ">=1,<2", ("pytest",)))
    monkeypatch.setattr(registry, "load_hooks", lambda: (Hook("made-up", "both", module, names, "a reason"),))
    check_hooks("cuda")  # not imported here: nothing to look for
    importlib.import_module("made_up")
    if not missing:
        check_hooks("cuda")
        return
    with pytest.raises(RunError) as caught:
        check_hooks("cuda")
    text = str(caught.value)
    version = importlib.import_module("pytest").__version__
    assert f"pytest {version} has no {module}.{'.'.join(names)}" in text
    assert text.endswith("(a reason); install pytest>=1,<2")


def test_an_untried_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "made-up", registry.Library("made_up", "<1", ("pytest",)))
    assert [name for name, _, _ in find_untried_versions()] == ["pytest"]


def test_dependencies_stay_within_the_tried_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(requirement for extra in project["optional-dependencies"].values() for requirement in extra),
    ]
    for library in LIBRARIES.values():
        upper = library.tried.partition(",")[2]
        for distribution in library.distributions:
            of_it = [
                requirement
                for requirement in requirements
                if requirement.partition(">")[0].partition("[")[0] == distribution
            ]
            assert all(requirement.endswith(upper) for requirement in of_it), of_it
