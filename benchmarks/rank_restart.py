"""Times the loss of a rank, from its death to the next step, with a restart of ranks and of the whole run; prints JSON.

    python benchmarks/rank_restart.py [--runs 2] [override ...]

A rank of the quickstart is killed after its third step, all of which are saved. Then either the run restarts its ranks
(`ranks_s`), or it ends and the same command is started again at once (`whole_s`), as a scheduler does at best.
`survivors` are the processes of engines, rollout workers and environments that are the same afterwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from header import header

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, read_heartbeats
from megatron_grpo.cluster.process_log import LOGS_FOLDER
from megatron_grpo.observability.run_files import METRICS_FILE, STARTS_FILE

DEADLINE_S, LOOK_S, STEPS = 900.0, 0.05, 3
QUIET = (
    "+exp=quickstart",
    "grpo.max_num_steps=100000",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.num_prompts_per_step=16",
    "checkpointing.save_period=1",
    "logger.progress=false",
)


def time_loss(overrides: Sequence[str], *, ranks_alone: bool) -> tuple[float, int]:
    """Seconds from a rank's death to the next step, and how many other processes live on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        options = [*QUIET, f"cluster.max_restarts={int(ranks_alone)}", f"run_dir={folder}", *overrides]
        command = [sys.executable, "-m", "megatron_grpo.train", *options]
        run = start(command)
        try:
            await_true(lambda: len(read_lines(folder / METRICS_FILE)) >= STEPS, run)
            pids = read_pids(folder)
            psutil.Process(pids["policy rank 0"]).kill()
            began = time.monotonic()
            if not ranks_alone:
                run.wait(DEADLINE_S)
                run = start(command)
            await_true(lambda: has_gone_on(folder), run)
            seconds = time.monotonic() - began
            survivors = sum(read_pids(folder).get(name) == pid for name, pid in pids.items() if name != "driver")
        finally:
            run.terminate()
            run.wait(DEADLINE_S)
        return seconds, survivors


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def await_true(condition: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    """Wait for a condition, while a run lives."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if run.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the run has ended with {run.poll()}, or nothing came within {DEADLINE_S:g} s")
        time.sleep(LOOK_S)


def has_gone_on(folder: Path) -> bool:
    """True once a run has made a step after its second start."""
    starts, steps = read_lines(folder / STARTS_FILE), read_lines(folder / METRICS_FILE)
    return len(starts) == 2 and bool(steps) and steps[-1]["step"] > starts[-1]["resumed_after"]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file of JSON; none without it."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_pids(folder: Path) -> dict[str, int]:
    beats = read_heartbeats(folder / LOGS_FOLDER / HEARTBEATS_FOLDER)
    return {beat.name: beat.pid for beat in beats.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    times: dict[bool, list[float]] = {True: [], False: []}
    survivors = 0
    for _ in range(arguments.runs):
        for ranks_alone in (True, False):
            seconds, count = time_loss(arguments.overrides, ranks_alone=ranks_alone)
            times[ranks_alone].append(round(seconds, 2))
            survivors = max(survivors, count)
    ratio = statistics.median(times[True]) / statistics.median(times[False])
    result = {"ranks_s": times[True], "whole_s": times[False], "ratio": round(ratio, 3), "survivors": survivors}
    print(json.dumps(header("rank_restart") | {"overrides": arguments.overrides} | result, indent=1))


if __name__ == "__main__":
    main()
