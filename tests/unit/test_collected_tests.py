"""What pytest makes of the tests themselves: which are skipped without a GPU, and a run that skips all of them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import conftest as gpu

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = "import pytest\n\n@pytest.mark.skip\ndef test_nothing(): pass\n"
PASSED = "\ndef test_something(): pass\n"


def make_item(path: Path) -> Any:
    """A collected test, of which only the path counts and the markers that it gets."""
    markers: list[pytest.MarkDecorator] = []
    return SimpleNamespace(path=path, markers=markers, add_marker=markers.append, get_closest_marker=lambda name: None)


def test_only_tests_of_gpus_are_skipped_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(gpu.DRY, raising=False)
    items = [make_item(ROOT / "tests/gpu/torch_only/test_one.py"), make_item(ROOT / "tests/parity/test_other.py")]
    gpu.pytest_collection_modifyitems(items)
    assert [[marker.name for marker in item.markers] for item in items] == [["skip"], []]


@pytest.mark.parametrize(
    ("source", "workers", "code"),
    [
        pytest.param(SKIPPED, "0", pytest.ExitCode.TESTS_FAILED, id="all skipped"),
        pytest.param(SKIPPED, "1", pytest.ExitCode.TESTS_FAILED, id="all skipped in workers"),
        pytest.param(SKIPPED + PASSED, "0", pytest.ExitCode.OK, id="one passed"),
    ],
)
def test_a_run_that_skips_everything_fails(tmp_path: Path, source: str, workers: str, code: int) -> None:
    (tmp_path / "test_these.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.nothing_shown", "-n", workers, "-c", "/dev/null"]
    process = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == code, process.stdout
    assert ("every test was skipped" in process.stdout) is (code != pytest.ExitCode.OK)


def test_the_process_that_hands_out_tests_waits_for_no_large_library() -> None:
    folders = ("tests", "tests.unit", "tests.parity", "tests.integration")
    code = f"import sys, {', '.join(f'{folder}.conftest' for folder in folders)}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "megatron.core", "vllm", "hydra"}.isdisjoint(process.stdout.split())
