"""What only a machine with a CUDA GPU can check: tests and timings, in two parts; prints one JSON of both.

    python benchmarks/gpu_check.py [--part torch_only|image|all] [--rehearse]

- `torch_only` needs PyTorch, Triton, transformers, Megatron-Core, safetensors and pure-Python packages: whether the
  kernels are right and how fast they are, what memory log-probabilities take, and whether the engine's gradients and
  optimizer steps, packed and padded, are those of transformers and torch, on one device.
- `image` needs Ray, vLLM and Transformer Engine too: what runs through them.

Exits with 1 when a test or a measurement failed. `--rehearse` goes through all of the first part that a CPU can run,
with the kernels in Triton's interpreter and small sizes: it checks this check, and no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from header import header

ROOT = Path(__file__).parents[1]
NEEDS = {"torch_only": (), "image": ("ray", "vllm", "transformer_engine")}
"""Parts, each a folder of tests/gpu, and packages without which it is left out."""

TIMINGS = {
    "logprob_hidden_1024": ["logprob.py", "--dtype=bfloat16"],
    "logprob_hidden_4096": ["logprob.py", "--dtype=bfloat16", "--hidden=4096"],
    "fp8_blocks": ["fp8_blocks.py"],
}
"""Benchmarks of the first part."""

SMALL = {
    "logprob": ["logprob.py", "--tokens=512", "--vocab=5000", "--hidden=64"],
    "fp8_blocks": ["fp8_blocks.py", "--rows=300", "--columns=300"],
}
"""The same, for a rehearsal."""


def main() -> int:
    """Run a command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*NEEDS, "all"], default="all")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("gpu-check: torch finds no CUDA GPU on this machine, so nothing was checked")
        return 0
    environment = _environment(options.rehearse)
    parts = [name for name in NEEDS if options.part in (name, "all")]
    result: dict[str, Any] = {**header("gpu_check"), "gpu": _gpu(), "rehearsed": options.rehearse, "parts": {}}
    for part in parts:
        missing = [name for name in NEEDS[part] if importlib.util.find_spec(name) is None]
        result["parts"][part] = {"not_run": f"needs {', '.join(missing)}"} if missing else run_tests(part, environment)
    if "torch_only" in parts:
        chosen = SMALL if options.rehearse else TIMINGS
        result["timings"] = {name: run_benchmark(command, environment) for name, command in chosen.items()}
    print(json.dumps(result, indent=2))
    failed = any(part.get("failed") or part.get("exit_code") for part in result["parts"].values())
    return int(failed or any("error" in timing for timing in result.get("timings", {}).values()))


def run_tests(part: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run the tests of a part; what they print goes to standard error.

    Returns:
        Counts of tests by outcome; of each failure its name and message; seconds of each test that ran; and pytest's
        exit code, which tells of tests that could not even be collected.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Not the repository's options: they ask for plugins of pytest that this part does without.
        command = ["-m", "pytest", f"tests/gpu/{part}", "-o", "addopts=--import-mode=importlib", f"--junitxml={report}"]
        ended = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else []
        return {"exit_code": ended.returncode, **_summary(list(cases))}


def _summary(cases: list[ElementTree.Element]) -> dict[str, Any]:
    """Of the test cases of a JUnit report."""
    failures, times, skipped = {}, {}, 0
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if problem is not None:
            failures[name] = problem.get("message", "")
        elif case.find("skipped") is not None:
            skipped += 1
            continue
        times[name] = float(case.get("time", 0))
    passed = len(times) - len(failures)
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures, "seconds": times}


def run_benchmark(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What a benchmark of this folder prints, a JSON; or its exit code and last words under "error"."""
    call = [sys.executable, str(Path(__file__).parent / command[0]), *command[1:]]
    ended = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        return {"error": f"exit code {ended.returncode}: {ended.stderr[-2000:]}"}
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _environment(rehearse: bool) -> dict[str, str]:
    """Of the processes that are started."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return found | {"GPU_CHECK_REHEARSED": "1", "TRITON_INTERPRET": "1"} if rehearse else found


def _gpu() -> dict[str, Any] | None:
    """The device, and what torch was built for; None: there is none."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    return {
        "name": device.name,
        "count": torch.cuda.device_count(),
        "memory_gib": device.total_memory / 2**30,
        "capability": f"{device.major}.{device.minor}",
        "cuda": torch.version.cuda,
        "layers": "torch" if importlib.util.find_spec("transformer_engine") is None else "transformer_engine",
    }


if __name__ == "__main__":
    sys.exit(main())
