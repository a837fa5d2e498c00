"""Simulates runs on up to thousands of GPUs: the real controller over ranks and engines that only pass time.

    python benchmarks/scale.py --gpus 512 1024 2048 4096 --result benchmarks/results/DATE_scale_cpu.json
    python benchmarks/scale.py --gpus 64 --modes separate async oversampling --faults none slow_engine lost_engine

The cases run one after the other in a process of their own (simulated_run.py). The result has for each what a step
costs the driver (CPU seconds by thread, memory, calls and bytes), what it costs Ray's other processes, and the seconds
of the simulated cluster by phase. Cases that the file of --result has are not measured again, so a command that was
interrupted goes on. Without --result the JSON is printed. docs/plan.md says what is simulated and what is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from header import commit, header
from simulated_case import FAULTS, MODES, Case
from simulated_parts import Times

from megatron_grpo.cluster.machines import prepare_ray_environment

HERE = Path(__file__).resolve().parent
LOOK_S = 0.2
"""Seconds between two looks for the next figures."""


def main() -> None:
    options = _options()
    prepare_ray_environment()  # the cases' processes inherit it
    # torch's store asks a name server for the address of each member, one after the other, and a lost answer costs 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    cases = [_case(options, g, m, f) for g in options.gpus for m in options.modes for f in options.faults]
    result: dict[str, Any] = {**header("scale"), "results": []}
    if options.result is not None and options.result.exists():
        result = json.loads(options.result.read_text())
    missing = [case for case in cases if asdict(case) not in [row["case"] for row in result["results"]]]
    for figures in _measure_case(missing):
        result["results"].append(figures)
        if options.result is not None:
            options.result.write_text(json.dumps(result, indent=2) + "\n")
    if options.result is None:
        print(json.dumps(result, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["separate"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["none"])
    parser.add_argument("--result", type=Path, help="file that keeps the results; without it they are printed")
    parser.add_argument("--profile", help="file for cProfile's figures of the driver's main thread")
    for name, (default, text) in {
        "steps": (2, "measured steps, after one to warm up"),
        "samples-per-gpu": (2, "samples of a step for each GPU"),
        "group": (16, "samples of a prompt"),
        "minibatches": (2, "optimizer steps of a step"),
        "tensor": (4, "tensor-parallel ranks of the policy"),
        "pipeline": (4, "pipeline stages of the policy"),
        "engine-tensor": (4, "GPUs of an engine"),
        "longest": (8192, "most tokens of a response"),
        "hosts": (2, "processes that share all ranks, engines, rollout workers and environments"),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    for name, (number, text) in {
        "speed-up": (4.0, "simulated seconds in a second"),
        "token-s": (0.015, "seconds of a decoding step with one response"),
        "response-s": (0.0001, "seconds that each further response adds to a decoding step"),
        "train-tokens-per-s": (1000.0, "tokens that a GPU trains on in a second"),
        "refit-gb-per-s": (25.0, "gigabytes that a GPU sends or receives in a second"),
        "message-s": (5e-5, "seconds of a message of a refit beside its bytes"),
        "move-s": (0.5, "seconds in which a GPU's state moves to host memory or back"),
        "median-tokens": (1000.0, "median of the log-normal lengths of responses"),
        "sigma": (0.8, "standard deviation of the logarithm of the lengths"),
        "right": (0.5, "share of the responses with reward 1"),
        "lost-after-s": (10.0, "seconds of a step after which an engine is lost"),
    }.items():
        parser.add_argument(f"--{name}", type=float, default=number, help=f"{text} (default: {number:g})")
    return parser.parse_args()


def _case(options: argparse.Namespace, gpus: int, mode: str, fault: str) -> Case:
    settings = vars(options)
    times = Times(**{name: settings[name] for name in Times.__dataclass_fields__})
    names = set(Case.__dataclass_fields__) - {"gpus", "mode", "fault", "times"}
    return Case(gpus=gpus, mode=mode, fault=fault, times=times, **{name: settings[name] for name in names})


def _measure_case(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Figures of each case as soon as they are there, and the case itself."""
    with tempfile.TemporaryDirectory(prefix="scale_", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "figures.jsonl"
        file.touch()
        command = [sys.executable, str(HERE / "simulated_run.py"), json.dumps([*map(asdict, cases)]), str(file), folder]
        with subprocess.Popen(command, cwd=HERE.parent, stdout=sys.stderr) as process, file.open() as lines:
            for case in cases:
                print(f"{case.gpus} GPUs, {case.mode}, fault: {case.fault}", file=sys.stderr)
                yield {**_next_line(lines, process), "commit": commit(HERE), "case": asdict(case)}


def _next_line(lines: TextIO, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for the next line of a file that a process writes; SystemExit if the process ends without it."""
    text = ""
    while not text.endswith("\n"):
        has_ended = process.poll() is not None
        text += lines.readline()
        if has_ended and not text.endswith("\n"):
            raise SystemExit(f"the simulation ended with exit code {process.returncode}")
        time.sleep(LOOK_S)
    figures: dict[str, Any] = json.loads(text)
    return figures


if __name__ == "__main__":
    main()
