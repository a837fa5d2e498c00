"""Tries faults on a real run: python -m megatron_grpo.drill [+exp=RECIPE] [cells=[policy:kill]] [key=value ...]"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.command_line import FAILED, as_command, parse_arguments
from megatron_grpo.config.errors import RunError
from megatron_grpo.verification.drill.cells import ACTIONS, PHASES, PROCESSES, Cell, parse_cells

COUNT = 12  # cells that are chosen at random, if none are named
USAGE = f"""\
python -m megatron_grpo.drill [+exp=RECIPE] [cells=[PROCESS:ACTION:PHASE,...]] [key=value ...]

Starts a run, and at random moments kills, stops or ends one of its processes. The run must recover, which is a step
with as many processes as before, or end: with one message, in bounded time, without processes that stay behind. A run
that has ended is started again. At the end checkpoints, figures and prompts are checked. Prints a table and writes
RUN_DIR.json, after every fault. Exit code 1 if a cell or a check failed.

  cells       faults, with wildcards; parts at the end may be left out, as in [policy:kill,engine*:*:generation]
                PROCESS  {", ".join(PROCESSES[:5])},
                         {", ".join(PROCESSES[5:])}, if the run has it on this machine
                ACTION   {", ".join(ACTIONS)} (SIGKILL, SIGSTOP, SIGTERM)
                PHASE    {", ".join(PHASES)}
              by default {COUNT} of all, at random
  count       how many cells of these, at random (all)
  seed        of the choice and the moments (0)
  deadline_s  of calls of processes, after which a stopped one is noticed (30)
  recovery_s  from when a fault can be noticed to the next step, or the end of the run (180)
  startup_s   from a start to its first step (600)
  run_dir     new folder of the run (outputs/drill/TIME)
  key         any other key of the configuration, as train takes them; without +exp a small run on CPUs
"""
# A step of about two seconds on two cores, in which each phase takes long enough to be met.
SMALL = (
    "+exp=quickstart",
    "grpo.num_prompts_per_step=32",
    "grpo.max_val_samples=256",
    "policy.train_global_batch_samples=128",
)


@dataclass(frozen=True, slots=True)
class DrillRequest:
    """The checked command line of a drill; USAGE explains the options."""

    cells: list[Cell]
    count: int | None
    seed: int
    deadline_s: float
    recovery_s: float
    startup_s: float
    run_dir: Path
    overrides: list[str]


@as_command("drill", USAGE, failures=(RunError, OSError))
def main(arguments: Sequence[str]) -> int:
    """Try the cells, and print the outcomes; return the exit code."""
    request = read_request(arguments)
    # Imported here, because they take seconds to import.
    from megatron_grpo.cluster.cleanup import interrupt_on_sigterm
    from megatron_grpo.verification.drill.drilled_run import DrilledRun
    from megatron_grpo.verification.drill.table import format_row, format_rows, write_results
    from megatron_grpo.verification.drill.trials import Limits, hold_drill
    from megatron_grpo.verification.drill.written_records import check_records

    run = DrilledRun(request.run_dir, request.overrides)
    limits = Limits(request.deadline_s, request.recovery_s, request.startup_s)
    file = request.run_dir.with_name(f"{request.run_dir.name}.json")
    trials = []
    print(f"starting the run {run.run_dir}, whose output is in {run.output}", flush=True)
    drill = hold_drill(run, request.cells, request.count, limits, random.Random(request.seed))
    with interrupt_on_sigterm(), closing(drill):  # the run ends with the drill
        for trial in drill:
            trials.append(trial)
            print(format_row(trial), flush=True)
            write_results(file, arguments, trials)
    problems = check_records(request.run_dir)
    write_results(file, arguments, trials, problems)
    failed = sum(not trial.has_passed for trial in trials)
    print("\n".join(["", format_rows(trials), "", *problems]))
    print(f"{'FAILED' if failed or problems else 'passed'}: {len(trials) - failed} of {len(trials)} cells; see {file}")
    return FAILED if failed or problems else 0


def read_request(arguments: Sequence[str]) -> DrillRequest:
    """Read and check a command line; ValueError: it cannot be run."""
    kinds = {"cells": list[str], "count": int, "seed": int, "run_dir": str}
    kinds |= dict.fromkeys(("deadline_s", "recovery_s", "startup_s"), float)
    parsed = parse_arguments(arguments, kinds, is_override=lambda name: name == "+exp" or not name.startswith("--"))
    options = parsed.options
    for name in ("count", "deadline_s", "recovery_s", "startup_s"):
        if options.get(name, 1) <= 0:
            raise ValueError(f"{name}={options[name]} must be > 0")
    run_dir = Path(options.get("run_dir") or time.strftime("outputs/drill/%Y-%m-%d_%H-%M-%S"))
    if run_dir.exists():
        raise ValueError(f"run_dir={run_dir} is there already; a drill begins a run of its own")
    deadline_s = options.get("deadline_s", 30.0)
    return DrillRequest(
        cells=parse_cells(options.get("cells", ["*"])),
        count=options.get("count", None if "cells" in options else COUNT),
        seed=options.get("seed", 0),
        deadline_s=deadline_s,
        recovery_s=options.get("recovery_s", 180.0),
        startup_s=options.get("startup_s", 600.0),
        run_dir=run_dir,
        overrides=_complete(parsed.overrides, deadline_s),
    )


def _complete(overrides: Sequence[str], deadline_s: float) -> list[str]:
    """Add what a drill needs before the overrides of the user."""
    from megatron_grpo.preflight.load import check_overrides  # here, because it takes long to import

    if not any(override.startswith(("+exp=", "job=")) for override in overrides):
        overrides = [*SMALL, *overrides]
    config = check_overrides(overrides).require()
    loop = config.loop_name
    needed = [
        f"{loop}.max_num_steps=1000000",
        f"{loop}.val_period=4",
        "checkpointing.save_period=2",
        "checkpointing.keep_newest=2",
        "checkpointing.keep_top_k=1",
        "cluster.max_restarts=1000",
        "generation.engine_restarts=1000",
        "logger.progress=false",
        "logger.report=false",
    ]
    needed += [f"{section}.timeout_s={deadline_s:g}" for section in ("policy", "refit", "generation", "rollouts")]
    needed += [f"env.{name}.timeout_s={deadline_s:g}" for name in config.env]
    completed = [*needed, *overrides]
    check_overrides(completed).require()
    return completed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
