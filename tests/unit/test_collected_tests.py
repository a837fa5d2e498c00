"""What pytest makes of the tests themselves: which are skipped without a GPU, and a run that skips all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the tests of GPUs run")
def test_only_tests_of_gpus_are_skipped_without_one() -> None:
    found = run_pytest("tests/gpu/torch_only", "tests/unit/losses/test_gae.py")
    assert found.returncode == 0, found.stdout
    assert " passed" in found.stdout
    assert " skipped" in found.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the tests of GPUs run")
def test_a_run_that_skips_everything_fails() -> None:
    found = run_pytest("-n", "1", "tests/gpu/torch_only")
    assert found.returncode == pytest.ExitCode.TESTS_FAILED, found.stdout
    assert "every test was skipped" in found.stdout
