"""The shell scripts and container files are clean, and the wheel carries everything a run needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "launchers").iterdir()), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_clean_and_executable(script: Path) -> None:
    done = subprocess.run([tool("shellcheck"), str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_container_files_are_clean(name: str) -> None:
    done = subprocess.run([tool("hadolint"), str(ROOT / "docker" / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_local_launcher_passes_its_arguments_and_keeps_the_output(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(tmp_path / "run")}
    command = [str(ROOT / "launchers" / "local.sh"), "grpo.max_num_step=3", "--cfg", "job"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean grpo.max_num_steps?" in done.stdout
    assert (tmp_path / "run" / "output.log").read_text() == done.stdout


def test_the_slurm_script_refuses_to_run_outside_slurm() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run([str(ROOT / "launchers" / "slurm_pyxis.sbatch")], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "slurm_pyxis.sbatch: start it with sbatch\n"


def test_the_wheel_carries_the_configuration_and_works_in_any_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, because a build leaves folders behind
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("megatron_grpo", "conf", "kernels"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
    ]
    subprocess.run([*build, "."], cwd=source, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assets = (ROOT / "megatron_grpo" / "observability" / "page" / "assets").iterdir()
    names = ROOT / "megatron_grpo" / "config" / "foreign_names.yaml"
    for file in (*(ROOT / "megatron_grpo").rglob("*.py"), *assets, names):
        assert (installed / file.relative_to(ROOT)).is_file(), file
    assert (installed / "megatron_grpo_kernels" / "__init__.py").is_file()
    code = (
        "from megatron_grpo import command; print(command.__file__); command.main(['+exp=quickstart', '--cfg', 'job'])"
    )
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert "name: quickstart" in done.stdout


def tool(name: str) -> str:
    """A command that was installed beside the interpreter, or is on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found
