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
SCRIPTS = [*sorted((ROOT / "launchers").iterdir()), ROOT / "requirements" / "install_cuda.sh", ROOT / ".ci" / "run"]


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


def submitted(tmp_path: Path, *arguments: str, nodes: int = 2, **variables: str) -> list[list[str]]:
    """The commands that the Slurm script gives to a srun that only records them."""
    folder = tmp_path / "submit"
    tools = tmp_path / "tools"
    for one in (folder, tools):
        one.mkdir(exist_ok=True)
    record = tmp_path / "commands"
    names = "\n".join(f"node{number}" for number in range(nodes))
    scripts = {
        # The driver's end ends the other nodes, so it waits until they are recorded.
        "srun": f"""
for _ in {{1..200}}; do
    [[ "$*" != *--nodelist=node0* || {nodes} = 1 || -s {record} ]] && break
    sleep 0.05
done
exec 9>>{record}; flock 9; printf '%s\\0' "$@" >&9; printf '\\n\\0' >&9""",
        "scontrol": f"echo '{names}'",
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HF_"))}
    env |= {"PATH": f"{tools}:{env['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    env |= {"SLURM_SUBMIT_DIR": str(folder), "HOME": str(tmp_path / "home"), "HEAD_IP": "10.0.0.1", **variables}
    command = [str(ROOT / "launchers" / "slurm_pyxis.sbatch"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [command.split("\0")[:-1] for command in record.read_text().split("\n\0")[:-1]]


def mounts_of(command: list[str]) -> list[str]:
    (mounts,) = [word.split("=", 1)[1] for word in command if word.startswith("--container-mounts=")]
    return mounts.split(",")


def test_what_a_run_writes_outlives_its_containers(tmp_path: Path) -> None:
    run, refit, more = tmp_path / "runs" / "one", tmp_path / "scratch" / "refit", tmp_path / "data"
    commands = submitted(
        tmp_path,
        "+exp=quickstart",
        f"refit.directory={refit}",
        CONTAINER_IMAGE="image.sqsh",
        RUN_DIR=str(run),
        CONTAINER_MOUNTS=f"{more}:/data",
    )
    assert len(commands) == 2, "the other node, then the first"
    for command in commands:
        home = tmp_path / "home" / ".cache" / "huggingface"
        expected = [f"{one}:{one}" for one in (tmp_path / "submit", run, home, refit)]
        assert mounts_of(command) == [*expected, f"{more}:/data"]
        assert "--cpu-bind=none" in command
    assert run.is_dir(), "pyxis mounts what is there"
    assert f"run_dir={run}" in commands[1]


def test_a_folder_within_the_submission_folder_is_mounted_with_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (command,) = submitted(tmp_path, nodes=1, CONTAINER_IMAGE="image.sqsh", RUN_DIR="runs/one", HF_HOME=str(models))
    assert mounts_of(command) == [f"{tmp_path / 'submit'}:{tmp_path / 'submit'}", f"{models}:{models}"]
    assert f"run_dir={tmp_path / 'submit' / 'runs' / 'one'}" in command
