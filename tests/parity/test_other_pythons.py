"""Adapters under other versions of Python: tests that need only a runtime environment, in a process of each.

The package is tested under the Python of its environment, 3.12, and used under newer ones. Here the tests of published
adapters run under every other version whose environment has torch and Megatron-Core. Looked at are the interpreters in
OTHER_PYTHONS (paths, separated by colons), `.venv-cuda/bin/python`, `.venv3*/bin/python`, and python3.12, python3.13
and python3.14 on the PATH and among pyenv's versions. `make PYTHON=python3.13 VENV=.venv313 test-unit` makes such an
environment.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER_PYTHONS = "OTHER_PYTHONS"
NEEDED = ("torch", "megatron.core", "transformers", "safetensors", "hydra", "omegaconf", "pytest", "pytest_timeout")
TESTS = ("test_published_adapters.py", "test_adapter_check.py")
QUESTION = f"""
import sys
from importlib.util import find_spec
missing = [name for name in {NEEDED} if find_spec(name.partition(".")[0]) is None or find_spec(name) is None]
print(sys.version_info[:2] == {sys.version_info[:2]} and "same" or ",".join(missing) or "whole")
"""


@cache
def interpreters() -> dict[str, str]:
    """Every other interpreter, with "whole", "same" (version), or the packages that it lacks."""
    listed = [Path(path) for path in os.environ.get(OTHER_PYTHONS, "").split(":") if path]
    listed += [*sorted(ROOT.glob(".venv-cuda/bin/python")), *sorted(ROOT.glob(".venv3*/bin/python"))]
    listed += [Path(path) for minor in (12, 13, 14) if (path := shutil.which(f"python3.{minor}")) is not None]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    listed += sorted(pyenv.glob("versions/3.1[234].*/bin/python"))
    versions = {}
    for path in listed:
        answer = subprocess.run([path, "-c", QUESTION], capture_output=True, text=True, check=False, cwd="/")
        versions[str(path)] = answer.stdout.strip() or "does not start"
    return versions


def test_adapters_are_published_under_other_versions() -> None:
    states = interpreters()
    usable = [path for path, state in states.items() if state == "whole"]
    if not usable:
        pytest.skip(f"no other Python with {', '.join(NEEDED)}; set {OTHER_PYTHONS}. Looked at: {states or 'none'}")
    for path in usable:
        # Without compiled modules every process of the tests would compile all of torch again.
        dropped = ("PYTEST_", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment |= {"PYTHONPATH": f"{ROOT}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "tp1-pp1-dp1 or merged_model"]
        command += [str(ROOT / "tests" / "parity" / name) for name in TESTS]
        process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
        assert process.returncode == 0, f"{path}: {process.stdout[-4000:]}{process.stderr[-2000:]}"
        assert " passed" in process.stdout
