"""Measures verifications of mathematical answers against math-verify's own speed, across the cores; prints JSON.

    python benchmarks/math_verification.py [--verifications 10000] [--processes 2]

Both sides compare the same answers, no two alike, so that no cache helps. math-verify's side is a process for each core
that calls it in a loop, in the way that it is meant to be called; ours is as many math environments, each with the
process that it keeps for the purpose. `ratio` is our speed over theirs, by the processor time that each took, which
other work on the machine hardly changes, and by the clock. Sides take turns in parts, so that both meet the same load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable
from typing import Any

from header import header

from megatron_grpo.data.interfaces import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.math_environment import MathEnvironment

Pair = tuple[str, str]
PARTS = 5


def main() -> None:
    options = _options()
    pairs = _pairs(options.verifications)
    sides: dict[str, list[dict[str, float]]] = {"math_verify": [], "environment": []}
    rights = []
    for part in range(PARTS):
        own = pairs[part::PARTS]
        for side, work in (("math_verify", _with_math_verify), ("environment", _with_environment)):
            seconds, right = _measure(work, own, options.processes)
            sides[side].append(seconds)
            rights.append(right)
    totals = {side: {kind: sum(one[kind] for one in parts) for kind in parts[0]} for side, parts in sides.items()}
    theirs, ours = totals["math_verify"], totals["environment"]
    result = {
        **header("math_verification"),
        "verifications": options.verifications,
        "processes": options.processes,
        "load": os.getloadavg()[0],
        "seconds": {side: {kind: round(value, 2) for kind, value in one.items()} for side, one in totals.items()},
        "ratio": {kind: round(theirs[kind] / ours[kind], 3) for kind in ours},
        "agree": rights[0::2] == rights[1::2],
        "right": sum(rights[1::2]),
    }
    print(json.dumps(result, indent=2))


def _pairs(count: int) -> list[Pair]:
    """Responses with answers of many forms, half of them right, and their references."""
    draw = random.Random(0)
    forms: list[Callable[[int, int], Pair]] = [
        lambda a, b: (f"so \\boxed{{{a * b}}}", str(a * b)),
        lambda a, b: (f"hence $\\boxed{{\\frac{{{a}}}{{{b}}}}}$", f"{a}/{b}"),
        lambda a, b: (f"\\boxed{{{a}x^2+{b}x}}", f"x({a}x+{b})"),
        lambda a, b: (f"The answer is {a}.{b:03}.", f"{a}.{b:03}"),
        lambda a, b: (f"\\boxed{{({a}, {b})}}", f"({a},{b})"),
        lambda a, b: (f"\\boxed{{{a}\\sqrt{{{b}}}}}", f"{a}\\sqrt{{{b}}}"),
    ]
    pairs = []
    for number in range(count):
        a, b = draw.randint(2, 999), 2 + number
        response, answer = forms[number % len(forms)](a, b)
        pairs.append((response, answer if draw.random() < 0.5 else f"{answer}1"))
    return pairs


def _measure(
    work: Callable[[list[Pair], Any], None], pairs: list[Pair], processes: int
) -> tuple[dict[str, float], int]:
    """Seconds by the clock and of processor time for all pairs, start-up aside, and how many were right."""
    context = multiprocessing.get_context("spawn")
    ends = []
    for number in range(processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(pairs[number::processes], theirs))
        process.start()
        ends.append((ours, process))
    for end, _ in ends:
        end.recv()
    started = time.perf_counter()
    for end, _ in ends:
        end.send("go")
    answers = [end.recv() for end, _ in ends]
    seconds = time.perf_counter() - started
    for end, process in ends:
        end.send("end")
        process.join()
    return {"clock": seconds, "processor": sum(one[1] for one in answers)}, sum(one[0] for one in answers)


def _with_math_verify(pairs: list[Pair], end: Any) -> None:
    from math_verify import parse, verify

    verify(parse("\\boxed{1}"), parse("$1$"))
    began = _processor_s()
    end.send("ready")
    end.recv()
    right = sum(verify(parse(f"\\boxed{{{answer}}}"), parse(response)) for response, answer in pairs)
    end.send((right, _processor_s() - began))
    end.recv()


def _with_environment(pairs: list[Pair], end: Any) -> None:
    environment = MathEnvironment()
    verifier = environment._verifier._process.pid
    began = _processor_s() + _processor_s_of(verifier)
    end.send("ready")
    end.recv()
    requests = [
        EnvironmentRequest(prompt="", response=response, stop_reason="stop", extra_env_info={REFERENCE: answer})
        for response, answer in pairs
    ]
    right = sum(bool(one.correct) for one in environment.score(requests))
    end.send((right, _processor_s() + _processor_s_of(verifier) - began))
    end.recv()


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _processor_s_of(pid: int) -> float:
    """Processor time of another process."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifications", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
