"""The wheel of `pip install .`: it has every file of the packages, and runs from any folder."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"megatron_grpo": "megatron_grpo", "conf": "megatron_grpo/conf", "kernels": "megatron_grpo_kernels"}
"""Folders of packages in the wheel, by folder of the repository."""
OF_BUILD = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def list_sources(folder: str) -> list[str]:
    """List the files of a folder that git has, or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the sources as `pip install .` builds it."""
    copy, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("built")
    for name in [*OF_BUILD, *(name for folder in PACKAGES for name in list_sources(folder))]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(built)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, check=True)
    (file,) = built.glob("megatron_grpo-*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_has_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{target}/{Path(name).relative_to(folder)}"
        for folder, target in PACKAGES.items()
        for name in list_sources(folder)
    }
    assert {Path(name).suffix for name in expected} >= {".py", ".yaml", ".template", ".js"}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["train", "+exp=quickstart", "--check"], "configuration is fine: quickstart, GRPO"),
        (["train", "+exp=quickstart_dpo", "--check"], "configuration is fine: quickstart_dpo, DPO"),
        (["new", "sums"], "sums"),
        (["train", "--help", "recipes"], "qwen3_8b_8gpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_installed_wheel_runs_from_any_folder(
    wheel: zipfile.ZipFile, command: list[str], text: str, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    process = run(wheel, command, folder, tmp_path / "site")
    assert process.returncode == 0, process.stderr
    assert text in process.stdout


def test_an_installed_wheel_is_what_runs_in_a_clone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Python finds the clone's package first, which has neither recipes nor kernels."""
    clone = tmp_path / "clone"
    for name in [*list_sources("megatron_grpo"), *list_sources("conf")]:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    (clone / "megatron_grpo" / "config" / "help.py").write_text("raise ImportError('of the clone')\n")
    process = run(wheel, ["train", "+exp=quickstart", "--check"], clone, tmp_path / "site")
    assert "configuration is fine: quickstart, GRPO" in process.stdout, process.stderr


def run(wheel: zipfile.ZipFile, command: list[str], folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with the wheel's packages and those of this environment, but not its own sources."""
    wheel.extractall(site)
    # Without site.py no .pth file is read, by which an editable installation is found.
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_path("purelib")])}
    arguments = [sys.executable, "-S", "-m", f"megatron_grpo.{command[0]}", *command[1:]]
    return subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, check=False)
