"""Measures verifications of mathematical answers against math-verify's own speed, across the cores; prints JSON.

    python benchmarks/math_verification.py [--verifications 10000] [--processes 2]

Both sides compare the same answers, no two alike, so that no cache helps: whole numbers, decimals, fractions,
polynomials, roots, pairs, sets, intervals, half of them wrong. math-verify's side is a process for each core that calls
it in a loop, in the way that it is meant to be called; ours is as many math environments, each with the process that it
keeps for the purpose and can kill. `ratio` is our speed over theirs, by the processor time that each took, which
other work on the machine hardly changes, and by the clock. Sides take turns in parts, so that both meet the same load.
`different` counts the answers on which the two disagree.
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
from contextlib import ExitStack
from multiprocessing.connection import Connection

import psutil
from header import header

from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.tasks import MathEnvironment

Pair = tuple[str, str]
Judged = tuple[list[bool], float]
"""Verdicts, and the processor time that they took, in seconds."""
PARTS = 10


def main() -> None:
    options = _options()
    pairs = _pairs(options.verifications)
    ours = theirs = _NOTHING
    with ExitStack() as stack:
        their_side = stack.enter_context(_Side(_with_math_verify, options.processes))
        our_side = stack.enter_context(_Side(_with_environment, options.processes))
        load = os.getloadavg()[0]
        for part in range(PARTS):
            share = pairs[part::PARTS]
            theirs, ours = _sum(theirs, their_side.judge(share)), _sum(ours, our_side.judge(share))
    result = {
        **header("math_verification"),
        "verifications": len(pairs),
        "processes": options.processes,
        "load": load,
        "seconds": {
            name: {"clock": round(side[1], 2), "processor": round(side[2], 2)}
            for name, side in (("math_verify", theirs), ("environment", ours))
        },
        "ratio": {"clock": round(theirs[1] / ours[1], 3), "processor": round(theirs[2] / ours[2], 3)},
        "right": sum(ours[0]),
        "different": sum(
            first_verdict != second_verdict for first_verdict, second_verdict in zip(ours[0], theirs[0], strict=True)
        ),
    }
    print(json.dumps(result, indent=2))


Total = tuple[list[bool], float, float]
"""Verdicts, and the seconds that they took by the clock and of processor time."""
_NOTHING: Total = ([], 0.0, 0.0)


def _sum(first_total: Total, second_total: Total) -> Total:
    return first_total[0] + second_total[0], first_total[1] + second_total[1], first_total[2] + second_total[2]


class _Side:
    """Processes that compare answers in one of the two ways."""

    def __init__(self, work: Callable[[Connection], None], processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,))
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> _Side:
        for end in self._ends:
            assert end.recv() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.send(None)
            process.join()

    def judge(self, pairs: list[Pair]) -> Total:
        """Compare pairs, shared out among the processes."""
        started = time.perf_counter()
        for number, end in enumerate(self._ends):
            end.send(pairs[number :: len(self._ends)])
        answers: list[Judged] = [end.recv() for end in self._ends]
        seconds = time.perf_counter() - started
        verdicts = [False] * len(pairs)
        for number, (right, _) in enumerate(answers):
            verdicts[number :: len(self._ends)] = right
        return verdicts, seconds, sum(processor for _, processor in answers)


def _with_math_verify(end: Connection) -> None:
    from math_verify import parse, verify

    verify(parse("\\boxed{\\frac{1}{2}}"), parse("$0.5$"))
    end.send("ready")
    while (pairs := end.recv()) is not None:
        began = _processor_s()
        right = [bool(verify(parse(f"\\boxed{{{answer}}}"), parse(response))) for response, answer in pairs]
        end.send((right, _processor_s() - began))


def _with_environment(end: Connection) -> None:
    environment = MathEnvironment()
    (verifier,) = (child.pid for child in psutil.Process().children())
    end.send("ready")
    while (pairs := end.recv()) is not None:
        began = _processor_s() + _processor_s_of(verifier)
        requests = [
            EnvironmentRequest(prompt="", response=response, stop_reason="stop", extra_env_info={REFERENCE: answer})
            for response, answer in pairs
        ]
        right = [bool(score.correct) for score in environment.score(requests)]
        end.send((right, _processor_s() + _processor_s_of(verifier) - began))


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
        lambda a, b: (f"\\boxed{{\\{{{b}, {a}, -{a}\\}}}}", f"\\{{-{a}, {a}, {b}\\}}"),
        lambda a, b: (f"for $x$ in \\boxed{{[{a}, {a + b})}}", f"[{a},{a + b})"),
    ]
    pairs = []
    for number in range(count):
        a, b = draw.randint(2, 999), 2 + number
        response, answer = forms[number % len(forms)](a, b)
        pairs.append((response, answer if draw.random() < 0.5 else _another(answer)))
    return pairs


def _another(answer: str) -> str:
    """A reference that differs from this one in its last digit."""
    index = max(number for number, character in enumerate(answer) if character.isdigit())
    return f"{answer[:index]}{(int(answer[index]) + 1) % 10}{answer[index + 1 :]}"


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
