"""Measures what a step costs the driver, between engines that make responses up and ranks that compute nothing.

    python benchmarks/data_plane.py [--samples 16384] [--tokens 4096] [--replicas 8]

Real steps of GRPO on a real Ray: rollout workers, environments, shards, log-probabilities, two passes of the optimizer,
rollouts on disk. Prints JSON: for each size the driver's CPU seconds a step (all threads), the bytes of objects that it
serialised and deserialised as a fraction of the token data (8 bytes a sampled token), and the growth of its resident
memory; medians of `--steps` steps after one. The code of another revision is measured beside it, at a size it can bear.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from header import header
from sides import Checkout, environment_of, opened

from megatron_grpo.cluster.machines import prepare_ray_environment

HERE = Path(__file__).resolve().parent
DEADLINE_S = 3600.0
BEFORE = "19e7a4f"
"""The last commit whose driver carries every token."""
SMALLEST, FACTOR = 1024, 4
"""Sizes grow by this factor from the smallest to --samples."""


def main() -> None:
    options = _options()
    prepare_ray_environment()  # the sides' processes inherit it
    result: dict[str, Any] = {**header("data_plane"), "replicas": options.replicas, "group": options.group}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="data_plane_", ignore_cleanup_errors=True)))
        sizes: list[dict[str, Any]] = []
        while not sizes or sizes[-1]["samples"] < options.samples:
            samples = min(SMALLEST * FACTOR ** len(sizes), options.samples)
            sizes.append(_measure(options, str(HERE.parent), "data_plane_now.py", samples, work))
        result |= {**sizes[-1], "sizes": sizes, "growth": _growth(sizes)}
        if not options.no_before:
            samples = min(options.before_samples, options.samples)
            result["before"] = _measure(options, options.before, "data_plane_before.py", samples, work)
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
        "before-samples": (1024, "samples of a step of the other revision"),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--before", default=BEFORE, help=f"revision or checkout to measure beside (default: {BEFORE})")
    parser.add_argument("--no-before", action="store_true", help="measure this checkout only")
    return parser.parse_args()


def _measure(options: argparse.Namespace, source: str, script: str, samples: int, work: Path) -> dict[str, Any]:
    """Figures of one side at one size, in processes of its own; and its commit."""
    names = ("tokens", "replicas", "group", "minibatches", "steps")
    sizes = {"samples": samples, **{name: getattr(options, name) for name in names}}
    print(f"{script}: {samples} samples", file=sys.stderr)
    with opened(source, work, DEADLINE_S) as (side, commit), tempfile.TemporaryDirectory(dir=work) as folder:
        assert isinstance(side, Checkout), "records of earlier runs say nothing about the driver"
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / script), json.dumps(sizes), str(file), folder]
        environment = environment_of(side.packages)
        subprocess.run(command, cwd=side.packages, env=environment, stdout=sys.stderr, timeout=DEADLINE_S, check=True)
        return {**json.loads(file.read_text()), "commit": commit}


def _growth(sizes: list[dict[str, Any]]) -> dict[str, float]:
    """The power of the number of samples that a figure grew by, from the smallest size to the largest; 1 is linear."""
    first, last = sizes[0], sizes[-1]
    if first is last:
        return {}
    names = ("driver_cpu_s", "driver_bytes", "wall_s")
    times = math.log(last["samples"] / first["samples"])
    return {name: round(math.log(last[name] / first[name]) / times, 3) for name in names}


if __name__ == "__main__":
    main()
