"""Files that cannot be read and folders that cannot be written are told as that, and nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_grpo.config.paths import check_readable, check_writable
from tests.support.ordinary_user import as_ordinary_user

LONG = "x" * 256


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may look into, as pytest's own may not be."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_readable(tmp_path / "file") is None
    assert check_readable(tmp_path / "nothing") == check_readable(tmp_path / "file" / "below") == "no such file"
    assert check_readable(tmp_path) == "is a folder, not a file"
    assert check_readable(tmp_path / LONG) == "cannot be read: File name too long"
    assert check_readable("a\0b") == "cannot be read: embedded null byte"
    assert check_readable(tmp_path, "folder") is None
    assert check_readable(tmp_path / "file", "folder") == "no such folder"
    assert check_readable(tmp_path / LONG, "folder") == "cannot be read: File name too long"


def test_what_belongs_to_somebody_else(open_folder: Path) -> None:
    (open_folder / "file").write_text("x")
    (open_folder / "file").chmod(0)
    (open_folder / "closed").mkdir(mode=0o700)
    assert as_ordinary_user(lambda: check_readable(open_folder / "file")) == "no permission to read it"
    assert as_ordinary_user(lambda: check_readable(open_folder / "closed", "folder")) == "no permission to read it"
    given = str(open_folder / "new" / "run")
    ((subject, text),) = as_ordinary_user(lambda: [(p.subject, p.text) for p in check_writable("run_dir", given)])
    assert (subject, text) == (f"run_dir={given}", f"no permission to write in {open_folder}")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("{tmp}/file/run", "{tmp}/file is not a folder"),
        ("{tmp}/dangling", "{tmp}/dangling is not a folder"),
        ("{tmp}/new/" + LONG, "cannot be made in {tmp}: File name too long"),
        ("{tmp}/" + "ü" * 200, "cannot be made in {tmp}: File name too long"),
        ("/proc/nowhere", "cannot be made in /proc: No such file"),
        ("a\0b", ": embedded null byte"),
    ],
)
def test_folders_that_cannot_be_made(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    (problem,) = check_writable("run_dir", path.format(tmp=tmp_path))
    assert text.format(tmp=tmp_path) in problem.text
    assert sorted(tmp_path.iterdir()) == before


def test_folders_that_can_be_made_are_not_made(tmp_path: Path) -> None:
    assert list(check_writable("run_dir", str(tmp_path / "a" / "b"))) == []
    assert list(check_writable("run_dir", str(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []
