"""A job's file is read within limits: what is not a few plain fields is refused, at once and in one line."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from megatron_grpo.config.job import MOST_BYTES, read_job_file
from tests.support.ordinary_user import as_ordinary_user

LAUGHS = "a0: &a0 [ha, ha, ha]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


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
        ("a: &a [*a]", "anchors or aliases"),
        (LAUGHS, "anchors or aliases"),
        ("base: &b {x: 1}\nmore: {<<: *b}", "anchors or aliases"),
        ("a: " + "[" * 3000, "nested more than 20 deep"),
        ("a: " + "{b: " * 3000, "nested more than 20 deep"),
        ("a: 1\na: 2", "has a twice"),
        ("a: " + "9" * 5000, "is not valid YAML"),
        ("[1, 2]", "must be a mapping of fields, not list"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: \x00", "is not valid YAML"),
    ],
)
def test_what_is_no_job_is_told_at_once(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    begin = time.monotonic()
    assert text in reason(file)
    assert time.monotonic() - begin < 2


def test_a_file_that_is_no_text_or_too_large(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert reason(file) == "is not UTF-8 text"
    with file.open("wb") as opened:
        opened.truncate(MOST_BYTES * 50)
    assert reason(file) == "has 50 MiB; a job is a few fields in YAML"
    assert "no such file" in reason(tmp_path)
    assert "cannot be read: File name too long" in reason("/tmp/" + "x" * 300)


def test_a_file_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "job.yaml")
        file.write_text("a: 1")
        assert as_ordinary_user(lambda: reason(file)) == "was read"
        file.chmod(0)
        assert as_ordinary_user(lambda: reason(file)) == "cannot be read: Permission denied"


def test_the_home_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.yaml").write_text("a: 1")
    assert read_job_file("~/job.yaml") == {"a": 1}
