"""Files of the working folder that have the names of the standard library's modules hide none of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CANARY = """
import os
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "canary"), "a") as file:
    file.write(__name__ + " ")
raise ImportError("hidden")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a file for every module of the standard library, and a module of the user's."""
    for name in sys.stdlib_module_names - set(sys.builtin_module_names):
        if importlib.util.find_spec(name) is not None:
            (tmp_path / f"{name}.py").write_text(CANARY)
    (tmp_path / "mine.py").write_text("def right(completions, **columns):\n    return [1.0 for _ in completions]\n")
    return tmp_path


def start_run(folder: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    process = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert not (folder / "canary").exists(), (folder / "canary").read_text()
    return process.stdout


def test_commands_find_the_standard_library_first(folder: Path) -> None:
    assert "megatron_grpo" in start_run(folder, "-m", "megatron_grpo", "--version")
    options = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[mine.right]"]
    assert "is fine" in start_run(folder, "-m", "megatron_grpo.train", "+exp=quickstart", "--check", *options)


def test_the_process_that_compares_answers_finds_it_first(folder: Path) -> None:
    verify = "from megatron_grpo.environments.math_answers import Verifier; print(Verifier().verify([('2', '2.0')]))"
    assert start_run(folder, "-c", verify) == "[True]\n"


def test_a_worker_of_ray_finds_it_first(folder: Path) -> None:
    """Ray puts the driver's working folder first, then imports what it is sent."""
    (folder / "default_worker_of_ray").mkdir()
    worker = folder / "default_worker_of_ray" / "default_worker.py"
    worker.write_text(f"import sys; sys.path.insert(0, {str(folder)!r}); import megatron_grpo; import colorsys, mine")
    start_run(folder, str(worker))


def test_a_script_keeps_its_folder_first(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("MINE = True")
    (tmp_path / "script.py").write_text("import megatron_grpo, colorsys; print(colorsys.MINE)")
    assert start_run(tmp_path, str(tmp_path / "script.py")) == "True\n"
