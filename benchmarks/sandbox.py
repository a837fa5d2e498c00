"""Scores programs of all kinds in the sandbox, and looks for what they leave behind; prints JSON.

    python benchmarks/sandbox.py [--programs 1000] [--at-once 2] [--level filtered]

The code environment scores them: two in three are right, the others fail, crash, never end, take more memory than they
may, write without end, or leave processes behind. `per_core_s` is programs for each second of processor time that
they and everything around them took; `per_s` is by the clock. `mixed` are all of them, with the processor seconds that
an endless program may take as `cpu_time_s`; `right` are as many right ones as are among them, beside the same
programs in bare Python, over which their speed is `ratio`. `wrong` counts wrong verdicts. `left` counts what is still
there after all: processes (orphans included), descriptors, mounts, files in the folder of temporary files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from header import header

from megatron_grpo.config.data_schema import LEVELS, IsolationLevel, SandboxConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.code import CodeEnvironment
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.sandbox.kernel import adopt_orphans, list_descendants
from megatron_grpo.environments.sandbox.sandbox import Sandbox

LIMITS = SandboxConfig(wall_time_s=20.0, cpu_time_s=1, memory_mb=256)
"""An endless program ends after a second of processor time; nothing else takes that long."""

RIGHT = "numbers = [int(word) for word in input().split()]\nprint(sum(numbers), max(numbers))\n"
PROGRAMS = {
    "right": RIGHT,
    "wrong": RIGHT.replace("max", "min"),
    "crash": "print(int(input()) // 0)\n",
    "no Python": "def main(:\n",
    "endless": "while True: pass\n",
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 22))\n",
    "output": "while True: print('x' * 1000)\n",
    "processes": "import subprocess\nfor _ in range(3): subprocess.Popen(['/bin/sleep', '600'], "
    "start_new_session=True)\n",
    "files": "for number in range(100): open(f'{number}.txt', 'w').write('x' * 10000)\n",
}
FAILING = [kind for kind in PROGRAMS if kind != "right"]


def main() -> None:
    options = _options()
    adopt_orphans()  # whatever a program leaves running stays among the descendants of this process
    with tempfile.TemporaryDirectory(prefix="benchmark_sandbox_") as folder:
        tempfile.tempdir = folder  # nobody else's temporary files are in it
        measured = measure(options)
    print(json.dumps({**header("sandbox"), **measured}, indent=2))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all kinds of programs, the right ones alone, and those without a sandbox."""
    environment = CodeEnvironment(_Settings(sandbox=LIMITS, level=options.level), programs_at_once=options.at_once)
    kinds = [_kind(number) for number in range(options.programs)]
    right = ["right"] * kinds.count("right")
    sandbox = Sandbox(LIMITS, options.level)
    environment.score([_request("right", number) for number in range(2 * options.at_once)])  # starts its threads
    before, load = _list_processes(), os.getloadavg()[0]
    mixed = _measure(kinds, lambda: _verdicts(environment, kinds))
    alone = _measure(right, lambda: _verdicts(environment, right))
    leftovers = _list_processes() - before
    bare = _measure(right, lambda: _bare(sandbox.python, len(right), options.at_once))
    return {
        "level": options.level,
        "at_once": options.at_once,
        "load": load,
        "kinds": dict(Counter(kinds)),
        "cpu_time_s": LIMITS.cpu_time_s,
        "mixed": mixed,
        "right": alone,
        "bare": bare,
        "ratio": round(alone["per_core_s"] / bare["per_core_s"], 3),
        "left": dict(Counter(name.partition(" ")[0] for name in leftovers)),
    }


@dataclass(frozen=True, kw_only=True)
class _Settings(EnvironmentSettings):
    """The settings of an environment whose programs run at a given level, and not at the strongest there is."""

    level: IsolationLevel

    def open_sandbox(self) -> Sandbox:
        return Sandbox(self.sandbox, self.level)


def _kind(number: int) -> str:
    """Two right programs, then one of the others in their turn."""
    return FAILING[number // 3 % len(FAILING)] if number % 3 == 2 else "right"


def _request(kind: str, number: int) -> EnvironmentRequest:
    """A program with its one test."""
    case = {"input": f"{number} 7 {number % 5}", "output": _expected_output(number)}
    extra = {"answer": [case], REFERENCE: ""}
    return EnvironmentRequest(prompt="", response=PROGRAMS[kind], stop_reason="stop", extra_env_info=extra)


def _expected_output(number: int) -> str:
    return f"{number + 7 + number % 5} {max(number, 7)}\n"


def _verdicts(environment: CodeEnvironment, kinds: Sequence[str]) -> list[bool]:
    scores = environment.score([_request(kind, number) for number, kind in enumerate(kinds)])
    return [bool(score.correct) for score in scores]


def _bare(python: str, programs: int, at_once: int) -> list[bool]:
    """The right programs in Python without a sandbox."""

    def is_right(number: int) -> bool:
        arguments = f"{number} 7 {number % 5}"
        command = [python, "-I", "-B", "-c", RIGHT]
        process = subprocess.run(command, input=arguments, capture_output=True, text=True, check=False)
        return process.stdout == _expected_output(number)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(is_right, range(programs)))


def _measure(kinds: Sequence[str], run: Callable[[], list[bool]]) -> dict[str, Any]:
    """Run programs of these kinds and say how fast it went, and how many verdicts were wrong."""
    began, started = _processor_s(), time.perf_counter()
    verdicts = run()
    seconds, processor = time.perf_counter() - started, _processor_s() - began
    return {
        "programs": len(kinds),
        "per_s": round(len(kinds) / seconds, 1),
        "per_core_s": round(len(kinds) / processor, 1),
        "wrong": sum(verdict != (kind == "right") for verdict, kind in zip(verdicts, kinds, strict=True)),
    }


def _processor_s() -> float:
    """Processor time of this process and of all that it waited for, in seconds."""
    used = [resource.getrusage(usage_of) for usage_of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _list_processes() -> set[str]:
    """What there is now of all that a program could leave behind, each with its kind as the first word."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        *(f"process {pid}" for pid in list_descendants(os.getpid())),
        *(f"descriptor {number}" for number in range(4096) if os.path.lexists(f"/proc/self/fd/{number}")),
        *(f"mount {line}" for line in mounts),
        *(f"temporary {name}" for name in os.listdir(tempfile.gettempdir())),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--level", choices=LEVELS, default="filtered")
    return parser.parse_args()


if __name__ == "__main__":
    main()
