"""gpu-check without a GPU: all of it, to its end; and on a machine with little more than torch."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import read_programs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check"),
]
LITTLE = read_programs("gpu_check")["little"]
"""A `sitecustomize` module: these packages are absent, and so is this one but for the checkout's folder."""


def dry_run(folder: Path, *options: str, **variables: str) -> dict[str, Any]:
    """The checks of a dry run that finds nothing wrong, by name."""
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--dry", "--result", str(folder / "dry.json")]
    environment = {**os.environ, **variables}
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks: dict[str, Any] = json.loads((folder / "dry.json").read_text())["checks"]
    return checks


def test_every_check_goes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    rows = {check.name: check for check in import_module("gpu_checks").CHECKS}
    checks = dry_run(tmp_path)
    assert {name: check["verdict"] for name, check in checks.items()} == {
        name: "dry" if row.dry else "not run" for name, row in rows.items()
    }
    assert len(checks["kernels"]["tests"]) > 20
    numbers = checks["logprob kernels, hidden 1024"]["numbers"]
    assert numbers["chunked"]["loss"] == pytest.approx(numbers["materialised"]["loss"], rel=1e-4)


def test_what_a_machine_lacks_is_not_run(tmp_path: Path) -> None:
    """Checks of kernels, shared memory and NCCL run there; checks of a model on ranks lack packages, and say which."""
    absent = ["ray", "vllm", "megatron", "hydra", "omegaconf", "antlr4", "pydantic", "datasets", "torchdata"]
    (tmp_path / "sitecustomize.py").write_text(LITTLE.format(names=absent))
    checks = dry_run(tmp_path, "--part", "torch_only", PYTHONPATH=str(tmp_path))
    ran = {name for name, check in checks.items() if check["verdict"] == "dry"}
    assert ran == {
        "kernels",
        "logprob kernels, hidden 1024",
        "logprob kernels, hidden 4096",
        "FP8 blocks",
        "NCCL",
        "shared memory",
    }
    assert checks["losses"]["why"] == "needs pydantic"
    assert checks["gradients"]["why"] == "needs megatron.core, pydantic, hydra, omegaconf, antlr4"
