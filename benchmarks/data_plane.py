"""Measures what a step costs the driver, between engines that make responses up and ranks that compute nothing.

    python benchmarks/data_plane.py [--samples 16384] [--tokens 4096] [--replicas 8]

Real steps of GRPO on a real Ray: rollout workers, environments, shards, log-probabilities, two passes of the optimizer,
rollouts on disk. Prints JSON: for each size the driver's CPU seconds a step (all threads), the bytes of objects that it
serialised and deserialised as a fraction of the token data (8 bytes a sampled token), and the growth of its resident
memory; medians of `--steps` steps after one. `growth` is the power of the number of samples with which a figure grows.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from header import header
from sides import environment_of

from megatron_grpo.cluster.machines import prepare_ray_environment

HERE = Path(__file__).resolve().parent
DEADLINE_S = 3600.0
SMALLEST, FACTOR = 1024, 4
"""Sizes grow by this factor from the smallest to --samples."""


def main() -> None:
    options = _options()
    prepare_ray_environment()  # the sides' processes inherit it
    result: dict[str, Any] = {**header("data_plane"), "replicas": options.replicas, "group": options.group}
    sizes: list[dict[str, Any]] = []
    while not sizes or sizes[-1]["samples"] < options.samples:
        sizes.append(_measure(options, min(SMALLEST * FACTOR ** len(sizes), options.samples)))
    result |= {**sizes[-1], "sizes": sizes, "growth": _growth(sizes)}
    print(json.dumps(result, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in {
        "samples": (16_384, "samples of a step, at the largest size"),
        "tokens": (4096, "mean tokens of a response"),
        "replicas": (8, "data-parallel ranks, and engines"),
        "group": (16, "samples of a prompt"),
        "minibatches": (1, "optimizer steps of each of the two passes over a step's samples"),
        "steps": (3, "measured steps, after one to warm up"),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    return parser.parse_args()


def _measure(options: argparse.Namespace, samples: int) -> dict[str, Any]:
    """Figures of steps of so many samples, in a process of their own."""
    names = ("tokens", "replicas", "group", "minibatches", "steps")
    sizes = {"samples": samples, **{name: getattr(options, name) for name in names}}
    print(f"{samples} samples", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="data_plane_", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / "data_plane_steps.py"), json.dumps(sizes), str(file), folder]
        environment = environment_of(HERE.parent)
        subprocess.run(command, cwd=HERE.parent, env=environment, stdout=sys.stderr, timeout=DEADLINE_S, check=True)
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def _growth(sizes: list[dict[str, Any]]) -> dict[str, float]:
    """The power of the samples by which a figure grew from the smallest size to the largest; 1: linear."""
    first, last = sizes[0], sizes[-1]
    if first is last:
        return {}
    names = ("driver_cpu_s", "driver_bytes", "wall_s")
    times = math.log(last["samples"] / first["samples"])
    return {name: round(math.log(last[name] / first[name]) / times, 3) for name in names}


if __name__ == "__main__":
    main()
