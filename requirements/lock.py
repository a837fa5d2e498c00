"""Resolves cpu.in and dev.in in one go into cpu.lock and dev.lock, and cuda.in into cuda.lock; every package is pinned.

cpu.lock and dev.lock are installed with `--no-deps`, because two packages ask for builds that break a CPU torch: the
vision, audio and codec companions of torch load CUDA libraries, and once they are present transformers imports no
model. They are for the interpreter that runs this script: `python requirements/lock.py`. cuda.lock is for Python 3.12
on x86_64, whatever runs this script, and is made of the public index alone, so that torch's CPU build cannot come in.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BREAKS_CPU_TORCH = {"torchvision", "torchaudio", "torchcodec"}
SOURCES = ["--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"]
"""Everything comes as a wheel but one package of pure Python, which has none."""


def resolve(*inputs: str) -> dict[str, str]:
    """Name -> version of everything pip would install for the input files together."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    for name in inputs:
        command += ["-r", str(HERE / name)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    items = (item["metadata"] for item in report["install"])
    pins = {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in items}
    return {name: version for name, version in pins.items() if name not in BREAKS_CPU_TORCH}


def resolve_cuda() -> dict[str, str]:
    """Name -> version of everything that cuda.in needs on a machine with CUDA; resolved by uv, which this asks for."""
    target = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_31"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    command += [*target, *SOURCES, str(HERE / "cuda.in")]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=alone).stdout
    pins = dict(line.split("==") for line in text.split())
    # The extension has no wheel: it is compiled against the torch of this lock (install_cuda.sh).
    return pins | {"transformer-engine-torch": pins["transformer-engine"]}


def write(name: str, pins: dict[str, str], note: str, how: str = "install with --no-deps") -> None:
    """Write a lock file, sorted by package."""
    pins = dict(pins)
    if (
        "torch" in pins and name == "cpu.lock"
    ):  # pip then refuses the CUDA build that public indexes serve as plain 2.13.0
        pins["torch"] = pins["torch"].split("+")[0] + "+cpu"
    lines = [f"# {note}", f"# Made by requirements/lock.py; {how}."]
    lines += [f"{package}=={version}" for package, version in sorted(pins.items())]
    (HERE / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    everything = resolve("cpu.in", "dev.in")
    runtime_names = resolve("cpu.in").keys()
    write("cpu.lock", {n: v for n, v in everything.items() if n in runtime_names}, "The CPU environment, fully pinned.")
    write("dev.lock", {n: v for n, v in everything.items() if n not in runtime_names}, "What cpu.lock lacks for tests.")
    write(
        "cuda.lock", resolve_cuda(), "The CUDA environment, fully pinned.", "installed by requirements/install_cuda.sh"
    )
