"""Which files of tests a change reaches; the expected ones are those that the changed file's own name stands in."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.changed import ROOT, Change

EVERY_TEST = sorted((ROOT / "tests").rglob("test_*.py"))
SANDBOX = "tests/unit/environments/sandbox/test_limits.py"


def list_reached(*files: str) -> set[str]:
    change = Change(set(files))
    return {str(path.relative_to(ROOT)) for path in EVERY_TEST if change.reaches(path)}


@pytest.mark.parametrize(
    ("file", "reached"),
    [
        ("megatron_grpo/losses/policy_loss.py", "tests/unit/losses/test_loss_against_trl.py"),
        ("megatron_grpo/losses/policy_loss.py", "tests/integration/test_run.py"),  # runs `-m megatron_grpo.train`
        ("megatron_grpo/environments/openenv.py", "tests/integration/test_openenv.py"),  # a configuration names it
        ("kernels/megatron_grpo_kernels/logprob.py", "tests/unit/kernels/test_fused_logprob.py"),
        ("conf/exp/quickstart.yaml", "tests/unit/config/test_recipes.py"),
        ("docs/agents.md", "tests/unit/test_documented_paths.py"),
        ("tests/support/engine_configs.py", "tests/unit/weight_sync/test_weight_trace.py"),
        ("tests/unit/losses/test_loss_against_trl.py", "tests/unit/losses/test_loss_against_trl.py"),
    ],
)
def test_a_change_reaches_what_uses_the_file_and_nothing_far_from_it(file: str, reached: str) -> None:
    tests = list_reached(file)
    assert reached in tests
    assert SANDBOX not in tests


def test_a_package_is_changed_by_the_start_of_its_modules() -> None:
    test = {"tests/unit/test_changed.py"}
    assert list_reached("megatron_grpo/losses/policy_loss.py") - test < list_reached("megatron_grpo/losses/__init__.py")


@pytest.mark.parametrize("file", ["pyproject.toml", "requirements/dev.lock", "Makefile"])
def test_what_all_tests_share_reaches_all(file: str) -> None:
    assert len(list_reached(file)) == len(EVERY_TEST)


def test_a_conftest_reaches_its_folder() -> None:
    names = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "parity").rglob("test_*.py")}
    assert names <= list_reached("tests/parity/conftest.py")


def test_nothing_is_collected_where_nothing_is_reached() -> None:
    folder: Path = ROOT / "tests" / "unit" / "observability"
    environment = {"CHANGED": "HEAD~0", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    arguments = ["--collect-only", "-q", "-p", "tests.support.changed", str(folder)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
