"""A job's file: fields as YAML has them, and one line about a file that has none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from megatron_grpo.config.job import read_job_file
from tests.support.ordinary_user import as_ordinary_user


def reason(path: Path | str) -> str:
    try:
        read_job_file(str(path))
    except ValueError as error:
        return str(error)
    return "was read"


def test_fields_are_read_as_yaml_has_them(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: 1\nb: [x, 2.5]\nc: {d: null}\n")
    assert read_job_file(str(tmp_path / "job.yaml")) == {"a": 1, "b": ["x", 2.5], "c": {"d": None}}
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_job_file(str(tmp_path / "empty.yaml")) == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: " + "[" * 3000, "is not valid YAML"),
        ("a: 1\na: 2", "found duplicate key a"),
        ("a: " + "9" * 5000, "is not valid YAML"),
        ("[1, 2]", "must be a mapping of fields, not list"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: \x00", "is not valid YAML"),
    ],
)
def test_what_is_no_job_is_told(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    assert text in reason(file)


def test_a_file_that_is_no_text_or_no_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not valid YAML: 'utf-8' codec can't decode" in reason(file)
    assert reason(tmp_path) == "is a folder, not a file"
    assert "no such file; give a YAML file of fields" in reason(tmp_path / "nothing")
    assert "cannot be read: File name too long" in reason("/tmp/" + "x" * 300)


def test_a_file_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "job.yaml")
        file.write_text("a: 1")
        assert as_ordinary_user(lambda: reason(file)) == "was read"
        file.chmod(0)
        assert as_ordinary_user(lambda: reason(file)) == "no permission to read it"


def test_the_home_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.yaml").write_text("a: 1")
    assert read_job_file("~/job.yaml") == {"a": 1}
