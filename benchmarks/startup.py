"""Times the start-up of the quickstart, from the command to its first step; prints JSON.

    python benchmarks/startup.py [--before REVISION_OR_CHECKOUT] [--runs 3] [override ...]

Each run makes two steps in a process of its own. `first_step_s` is the time from the command until the first step is
written: work that is moved from the start into the first step is counted. `cpu_s` is what all processes of the run have
computed by then, which says more than seconds on a machine that others use too; how much they do is `other_cores`, and
`quiet` is false where it is more than a tenth of the machine. A first run of each side, which is not counted, fills the
machine's file cache; then the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from header import header
from sides import ROOT, Checkout, environment_of, opened

QUIET = ("checkpointing=none", "logger.progress=false", "grpo.val_at_start=false", "grpo.val_at_end=false")
STEPS = 2
DEADLINE_S = 600.0
LOOK_S = 0.5
QUIET_SHARE = 0.1


class Family:
    """CPU seconds of a process and all that it starts, those that have ended included."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._seconds: dict[psutil.Process, float] = {}

    def look(self) -> float:
        """Seconds until now."""
        try:
            members = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            members = []
        for member in members:
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._seconds[member] = times.user + times.system
        return sum(self._seconds.values())


def measure(side: Checkout, overrides: Sequence[str]) -> dict[str, Any]:
    """One start-up of one side."""
    with tempfile.TemporaryDirectory(dir=side.work, ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        loop = [f"grpo.max_num_steps={STEPS}", *QUIET, f"run_dir={run_dir}"]
        command = [sys.executable, "-m", "megatron_grpo.train", "+exp=quickstart", *loop, *overrides]
        environment = environment_of(side.packages) | {"MEGATRON_GRPO_CACHE": str(side.work / "cache")}
        load, busy_before, began = os.getloadavg()[0], _busy_s(), time.monotonic()
        with (
            (Path(folder) / "log").open("w+") as log,
            subprocess.Popen(command, cwd=side.packages, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                first_step_s, cpu_s = _first_step(process, run_dir / "metrics.jsonl", began)
                busy_s = _busy_s() - busy_before
                if first_step_s is None or process.wait(DEADLINE_S):
                    log.seek(0)
                    raise SystemExit(f"the run failed:\n{log.read()}")
            finally:
                if process.poll() is None:
                    process.terminate()
        summary = json.loads((run_dir / "summary.json").read_text())
        step = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    other_cores = max(0.0, busy_s - cpu_s) / first_step_s
    return {
        "first_step_s": first_step_s,
        "cpu_s": cpu_s,
        "startup_s": summary["startup_s"],
        "startup_parts_s": summary.get("startup_parts_s"),
        "of_first_step_s": step["timing"]["total"],
        "loadavg_before": load,
        "other_cores": other_cores,
        "quiet": other_cores < QUIET_SHARE * (os.cpu_count() or 1),
    }


def _first_step(process: subprocess.Popen[Any], metrics: Path, began: float) -> tuple[float | None, float]:
    """Seconds and CPU seconds until the first step is written; None: the run ended before that."""
    family, looked = Family(process.pid), 0.0
    while process.poll() is None and time.monotonic() - began < DEADLINE_S:
        if metrics.exists() and metrics.stat().st_size:
            return time.monotonic() - began, family.look()
        if time.monotonic() - looked > LOOK_S:
            family.look()
            looked = time.monotonic()
        time.sleep(0.02)
    return None, family.look()


def _busy_s() -> float:
    """CPU seconds that this machine has computed since it was started."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.irq + times.softirq)


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median of each figure over the runs."""
    figures = {name: statistics.median(run[name] for run in runs) for name in ("first_step_s", "cpu_s", "startup_s")}
    parts = [run["startup_parts_s"] for run in runs if run["startup_parts_s"]]
    return figures | {
        "startup_parts_s": {name: statistics.median(part[name] for part in parts) for name in parts[0]}
        if parts
        else None
    }


def compare(before: str | None, runs: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Start-ups of this checkout, and of another one in turn with them."""
    sources = {"after": str(ROOT)} if before is None else {"before": before, "after": str(ROOT)}
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides, commits = {}, {}
        for name, source in sources.items():
            side, commits[name] = stack.enter_context(opened(source, path / name, DEADLINE_S))
            assert isinstance(side, Checkout), f"{source} holds records, not code"
            sides[name] = side
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(runs + 1):
            for name, side in sides.items():
                run = measure(side, overrides)
                if number:
                    measured[name].append(run)
    result = {**header("startup"), "overrides": list(overrides), "commits": commits}
    result |= {f"{name}_median": medians(parts) for name, parts in measured.items()}
    if before is not None:
        for figure in ("first_step_s", "cpu_s"):
            result[f"{figure}_ratio"] = result["after_median"][figure] / result["before_median"][figure]
    return result | {"runs": measured}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.before, arguments.runs, arguments.overrides), indent=2))
