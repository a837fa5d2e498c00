"""benchmarks/gpu_check.py says when it checked nothing, and sums up what it checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
PART = """
import pytest

def test_right(): ...

def test_wrong():
    assert 1 == 2, "one is not two"

@pytest.fixture
def broken():
    raise OSError("no such file")

def test_without_its_fixture(broken): ...

@pytest.mark.skip(reason="not here")
def test_left_out(): ...
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, with the modules beside it, as if it had been started."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield import_module("gpu_check")
    for name in ("gpu_check", "header"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_was_checked() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "gpu-check: torch finds no CUDA GPU on this machine, so nothing was checked\n"


def test_every_outcome_of_a_part_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpu" / "made_up"
    folder.mkdir(parents=True)
    (folder / "test_made_up.py").write_text(PART)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    found = script.run_tests("made_up", dict(os.environ))
    assert (found["exit_code"], found["passed"], found["failed"], found["skipped"]) == (1, 1, 2, 1)
    assert found["seconds"].keys() == {"test_made_up::test_right", *found["failures"]}
    assert "one is not two" in found["failures"]["test_made_up::test_wrong"]
    assert "no such file" in found["failures"]["test_made_up::test_without_its_fixture"]


def test_tests_that_cannot_be_read_are_a_failure(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.run_tests("not_there", dict(os.environ))["exit_code"] != 0


@pytest.mark.slow
def test_a_benchmark_that_fails_is_told(script: ModuleType) -> None:
    found = script.run_benchmark(["logprob.py", "--dtype=float3"], dict(os.environ))
    assert "exit code 1" in found["error"]
    assert "float3" in found["error"]
