"""Resolve cpu.in and dev.in in one go and write cpu.lock and dev.lock, every package pinned.

The lock files are installed with `--no-deps`, because two packages ask for builds that break a CPU torch: the vision,
audio and codec companions of torch load CUDA libraries, and once they are present transformers imports no model at all.
Run with the interpreter whose versions the lock is for: `python requirements/lock.py`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BREAKS_CPU_TORCH = {"torchvision", "torchaudio", "torchcodec"}


def resolve(*inputs: str) -> dict[str, str]:
    """Name -> version of everything pip would install for the input files together."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    for name in inputs:
        command += ["-r", str(HERE / name)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    items = (item["metadata"] for item in report["install"])
    pins = {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in items}
    return {name: version for name, version in pins.items() if name not in BREAKS_CPU_TORCH}


def write(name: str, pins: dict[str, str], note: str) -> None:
    pins = dict(pins)
    if "torch" in pins:  # the +cpu label makes pip refuse the CUDA build that public indexes serve as plain 2.13.0
        pins["torch"] = pins["torch"].split("+")[0] + "+cpu"
    lines = [f"# {note}", "# Made by requirements/lock.py; install with --no-deps."]
    lines += [f"{package}=={version}" for package, version in sorted(pins.items())]
    (HERE / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    everything = resolve("cpu.in", "dev.in")
    runtime_names = resolve("cpu.in").keys()
    write("cpu.lock", {n: v for n, v in everything.items() if n in runtime_names}, "The CPU environment, fully pinned.")
    write("dev.lock", {n: v for n, v in everything.items() if n not in runtime_names}, "What cpu.lock lacks for tests.")
