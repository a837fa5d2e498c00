"""Measures how many programs a core runs in the sandbox, beside the same programs without it; prints JSON.

    python benchmarks/sandbox.py [--programs 1000] [--at-once 2] [--level filtered]

`per_core_s` is programs for each second of processor time that they and everything around them took; `per_s` is by
the clock. `wrong` counts programs whose output was not the right one, and `left` processes that were
still there afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from header import header

from megatron_grpo.config.sandbox_schema import LEVELS, SandboxConfig
from megatron_grpo.environments.sandbox.process_tree import descendants
from megatron_grpo.environments.sandbox.sandbox import Sandbox

PROGRAM = "numbers = [int(word) for word in input().split()]\nprint(sum(numbers), max(numbers))\n"


def main() -> None:
    options = _options()
    sandbox = Sandbox(SandboxConfig(wall_time_s=60.0), options.level)

    def bare(given: str) -> str:
        command = [sandbox.python, "-I", "-B", "-c", PROGRAM]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False).stdout

    result = {
        **header("sandbox"),
        "level": options.level,
        "programs": options.programs,
        "at_once": options.at_once,
        "load": os.getloadavg()[0],
        "sandbox": _measure(options, lambda given: sandbox.run_python(PROGRAM, given).stdout),
        "bare": _measure(options, bare),
    }
    print(json.dumps(result, indent=2))


def _measure(options: argparse.Namespace, run: Callable[[str], str]) -> dict[str, Any]:
    """Run all programs and say how fast it went."""
    before, began, started = set(descendants(os.getpid())), _processor_s(), time.perf_counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        outputs = list(pool.map(lambda number: run(f"{number} 7 {number % 5}"), range(options.programs)))
    seconds, processor = time.perf_counter() - started, _processor_s() - began
    right = [f"{number + 7 + number % 5} {max(number, 7)}\n" for number in range(options.programs)]
    return {
        "per_s": round(options.programs / seconds, 1),
        "per_core_s": round(options.programs / processor, 1),
        "wrong": sum(output != expected for output, expected in zip(outputs, right, strict=True)),
        "left": len(set(descendants(os.getpid())) - before),
    }


def _processor_s() -> float:
    """Processor time of this process and of all that it waited for, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--level", choices=LEVELS, default="filtered")
    return parser.parse_args()


if __name__ == "__main__":
    main()
