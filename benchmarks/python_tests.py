"""Scores right programs by Python tests, beside a harness that runs them in the process of their tests; prints JSON.

    python benchmarks/python_tests.py [--programs 1000] [--at-once 2] [--level filtered]

The programs are the honest ones of the tests' table (tests/support/python_tests.py), each under many names and with
other text around it. `apart` runs them as the code environment does, `together` in one process with their tests.
`per_core_s` is programs for each second of processor time that they and everything around them took, `ratio` that of
`apart` over that of `together`. `wrong` counts the right programs that did not pass, by kind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from header import header

from megatron_grpo.config.data_schema import LEVELS, SandboxConfig
from megatron_grpo.environments.code import check_program
from megatron_grpo.environments.sandbox.sandbox import Sandbox

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.python_tests import HONEST

TOGETHER = """
import os, sys
def judge(program, tests):
    mark, report = sys.stdin.readline(), os.dup(1)
    names = {"__name__": "__main__"}
    passed = 0
    try:
        exec(compile(program, "program.py", "exec"), names)
    except BaseException:
        tests = []
    for test in tests:
        try:
            exec(compile(test, "test.py", "exec"), names)
            passed += 1
        except BaseException:
            pass
    os.write(report, f"\\n{mark.strip()} {passed}\\n".encode())
    os._exit(0)
"""


def main() -> None:
    options = _options()
    print(json.dumps({**header("python_tests"), **measure(options)}, indent=2))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways, in turns of a hundred programs, so that the load of the machine is the same for both."""
    sandbox = Sandbox(SandboxConfig(wall_time_s=60), options.level)
    programs = [variant(number) for number in range(options.programs)]
    figures: dict[str, Any] = {"level": options.level, "at_once": options.at_once, "load": os.getloadavg()[0]}
    ways: dict[str, Callable[..., bool]] = {"apart": apart, "together": together}
    seconds, wrong = Counter[str](), {way: Counter[str]() for way in ways}
    for begin in range(0, len(programs), 100):
        for way, passes in ways.items():
            before = _processor_s()
            with ThreadPoolExecutor(options.at_once) as pool:
                one_by_one = lambda case: passes(sandbox, case[1], case[2])  # noqa: B023, E731 - used in this turn only
                outcomes = list(pool.map(one_by_one, programs[begin : begin + 100]))
            seconds[way] += _processor_s() - before  # type: ignore[assignment]
            wrong[way].update(
                kind for (kind, _, _), passed in zip(programs[begin:], outcomes, strict=False) if not passed
            )
    speeds = {way: len(programs) / seconds[way] for way in ways}
    for way in ways:
        figures[way] = {"programs": len(programs), "per_core_s": round(speeds[way], 2), "wrong": dict(wrong[way])}
    return {**figures, "ratio": round(speeds["apart"] / speeds["together"], 3)}


def variant(number: int) -> tuple[str, str, tuple[str, ...]]:
    """A kind of program under another name of its function, with other text around it; kind, program and tests."""
    program, draw = HONEST[number % len(HONEST)], random.Random(number)
    name = f"{draw.choice(('solve', 'answer', 'compute', 'find'))}_{draw.randrange(1000)}"
    before = draw.choice(("", "import math, re\n", "from typing import Any\n", f"# {name}\n", f"OFFSET = {number}\n"))
    after = draw.choice(("", f"\n\ndef other_{number}(x):\n    return x\n", "\nprint('ready')\n", "\n'''the end'''\n"))
    renamed = [re.sub(r"\bf\b(?!['\"])", name, text) for text in (program.program, *program.tests)]
    return program.kind, before + renamed[0] + after, tuple(renamed[1:])


def apart(sandbox: Sandbox, program: str, tests: tuple[str, ...]) -> bool:
    verdict = check_program(sandbox, program, tests, run_all=True, allow_untrusted=False)
    return verdict.passed == verdict.tests


def together(sandbox: Sandbox, program: str, tests: tuple[str, ...]) -> bool:
    last = sandbox.run_python(f"{TOGETHER}\njudge({program!r}, {list(tests)!r})\n", "mark\n").stdout.split()[-2:]
    return last == ["mark", str(len(tests))]


def _processor_s() -> float:
    """Processor time of this process and of all that it waited for, in seconds."""
    used = [resource.getrusage(usage_of) for usage_of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--level", choices=LEVELS, default="filtered")
    return parser.parse_args()


if __name__ == "__main__":
    main()
