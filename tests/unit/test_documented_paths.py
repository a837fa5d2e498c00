"""Files, folders and modules that the documents name are there: a rename that forgets the documents fails here."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_grpo"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TOP = "benchmarks|conf|docker|docs|kernels|launchers|megatron_grpo|requirements|tests"

QUOTED_FOLDER = re.compile(r"`((?:[\w*]+/)+)`")
SOURCE_FILE = re.compile(r"(?<![\w/*])((?:[\w*]+/)*[\w*]+\.py)\b")
FROM_THE_TOP = re.compile(rf"(?<![\w/.-])((?:{TOP})/[\w*./-]*\w/?)")
MODULE = re.compile(r"(?<![\w/.])megatron_grpo(?:\.\w+)+")


def missing_paths(text: str) -> list[str]:
    """Folders in backticks and Python files in a text that neither the repository nor the package has.

    A name of one part may lie anywhere in the package, as `rank/` in the row of `policy/` does.
    """
    named = {*QUOTED_FOLDER.findall(text), *SOURCE_FILE.findall(text)}
    return sorted(name for name in named if not _exists(name))


def _exists(name: str) -> bool:
    inner = name.rstrip("/")
    pattern = inner if "/" in inner else f"**/{inner}"
    folder = name.endswith("/")
    matches = [*ROOT.glob(inner), *PACKAGE.glob(pattern)]
    return any(path.is_dir() if folder else path.is_file() for path in matches)


def missing_from_the_top(text: str) -> list[str]:
    """Paths in a text that begin with a folder of the repository's root and are not there."""
    return sorted({name for name in FROM_THE_TOP.findall(text) if not any(ROOT.glob(name.rstrip("/")))})


def missing_modules(text: str) -> list[str]:
    """Dotted names of the package in a text that are neither a module nor a name in their module's source."""
    return sorted(name for name in set(MODULE.findall(text)) if not any(_defines(name)))


def _defines(name: str) -> Iterator[bool]:
    parent, _, last = name.rpartition(".")
    for source in _sources(name):
        yield source.exists()
    for source in _sources(parent):
        yield source.exists() and re.search(rf"\b{last}\b", source.read_text()) is not None


def _sources(module: str) -> tuple[Path, Path]:
    # conf/ lies at the top of the repository, and is a module of the package once that is installed.
    path = ROOT.joinpath(*re.sub(r"^megatron_grpo\.conf\b", "conf", module).split("."))
    return path.with_suffix(".py"), path / "__init__.py"


def test_architecture_names_files_and_folders_that_are_there() -> None:
    assert missing_paths(ARCHITECTURE.read_text()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_from_the_top_and_modules_are_there(document: Path) -> None:
    text = document.read_text()
    assert missing_from_the_top(text) == []
    assert missing_modules(text) == []


def test_what_is_not_there_is_found() -> None:
    text = (
        "`losses/` and `lost/`, `gone/away.py`, (algorithms/grpo.py), `*_schema.py`, tests/unit/test_gone.py, "
        "megatron_grpo.train, megatron_grpo.gone, megatron_grpo.observability.read_rollouts, "
        "megatron_grpo.observability.read_nothing"
    )
    assert missing_paths(text) == ["gone/away.py", "lost/", "tests/unit/test_gone.py"]
    assert missing_from_the_top(text) == ["tests/unit/test_gone.py"]
    assert missing_modules(text) == ["megatron_grpo.gone", "megatron_grpo.observability.read_nothing"]


def test_architecture_has_a_row_for_every_part() -> None:
    text = ARCHITECTURE.read_text()
    parts = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(part for part in parts if f"`{part}/`" not in text) == []


def test_architecture_names_functions_of_their_files() -> None:
    named = re.findall(r"`((?:\w+/)*\w+\.py):(\w+)`", ARCHITECTURE.read_text())
    assert len(named) > 40
    missing = [
        (file, name)
        for file, name in named
        if not re.search(rf"^ *(?:async def|def|class) {name}\b", (PACKAGE / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_a_step_reads_in_few_files_and_lines() -> None:
    section = ARCHITECTURE.read_text().partition("## The files of a step")[2].partition("Off this path")[0]
    files = re.findall(r"`([\w/]+\.py)`", section)
    assert len(files) == len(set(files)) <= 24
    assert sum(len((PACKAGE / file).read_text().splitlines()) for file in files) <= 6100


def test_names_that_extending_says_are_in_a_file_are_in_it() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    mentions = re.findall(r"`([\w.]+)` (?:of `\w+` )?in `((?:\w+/)+\w+\.(?:py|yaml))`", text)
    assert len(mentions) > 15
    missing = []
    for name, file in mentions:
        path = next(folder / file for folder in (PACKAGE, ROOT) if (folder / file).exists())
        if name.rpartition(".")[2] not in path.read_text():
            missing.append((name, file))
    assert missing == []
