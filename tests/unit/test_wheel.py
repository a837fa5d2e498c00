"""The wheel of `pip install .`: it has every file of the packages, and runs from any folder."""

import os
import subprocess
import sys
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
    site, folder = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(site)
    folder.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(site)}
    where = "import megatron_grpo, megatron_grpo_kernels; print(megatron_grpo.__file__, megatron_grpo_kernels.__path__)"
    located = subprocess.run(
        [sys.executable, "-c", where], cwd=folder, env=variables, capture_output=True, text=True, check=True
    )
    assert located.stdout.count(str(site)) == 2, "the sources are not what runs"
    arguments = [sys.executable, "-m", f"megatron_grpo.{command[0]}", *command[1:]]
    process = subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert text in process.stdout
