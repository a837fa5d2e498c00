"""Goes through `gpu_checks.CHECKS`, what only a machine with CUDA GPUs can show, and writes one JSON of the verdicts.

    python benchmarks/gpu_check.py [--part torch_only|image|all] [--result FILE] [--minutes M] [--again NAME...] [--dry]
    python benchmarks/gpu_check.py --only NAME... [--result FILE] [--minutes M] [--dry]

The file is written after every check, and a later call goes on with those that it lacks: a call may be interrupted, or
given `--minutes` where commands are limited. `--again` runs checks once more: those named, or `failed`. `--only` runs
these and no others, in this order, whatever the file has. Verdicts:

- `pass`, `fail` (with the messages), and for each test of the check its own verdict, seconds and numbers;
- `not run`: why, such as GPUs or packages that the machine lacks; tried again by the next call;
- `dry`: with `--dry` nothing needs a GPU: a check runs in the way that its row names, which tests the check's own code.

Exits with 1 when a check failed, with 3 when checks are left for another call, else with 0.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from gpu_checks import CHECKS, CUDA_ONLY, PARTS, Check
from header import commit, header

ROOT = Path(__file__).parents[1]
IDENTITY = ("machine", "versions", "gpus", "dry")
"""Entries of a result that have to be equal for a call to go on with it."""
DRY = "GPU_CHECK_DRY"
"""Environment variable of checks that run without a GPU: their row's `dry`."""
KILLS = 6
"""Rounds of five seconds at most in which a check's processes are killed: one that a device holds does not end."""
CPU_PATIENCE = 3
"""A dry run's deadlines are as many times as long."""
LEFT = 3
"""Exit code: checks are left for another call."""
CODES = (0, 1, 5)
"""Exit codes of pytest that say no more than the outcomes of its tests: passed, failed (or all skipped), none found."""
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

Record = dict[str, Any]
"""A part of the result: types of JSON."""


def main(arguments: list[str] | None = None, checks: tuple[Check, ...] = CHECKS) -> int:
    """Run a command line; returns the exit code."""
    options = _options(arguments, checks)
    gpus = [] if options.dry else visible_gpus()
    if not gpus and not options.dry:
        print("gpu-check: this machine has no CUDA GPU, so nothing was checked (--dry checks the checks)")
        return 0
    result = open_result(options.result, {**header("gpu_check"), "gpus": gpus, "dry": options.dry, "checks": {}})
    chosen = [check for check in checks if options.part in (check.part, "all")]
    if options.only:
        by_name = {check.name: check for check in checks}
        chosen = [by_name[name] for name in options.only]
    exit_code = run(chosen, result, options)
    print(json.dumps(result, indent=2))
    failed = any(record["verdict"] == "fail" for record in result["checks"].values())
    return 1 if failed else LEFT if exit_code else 0


def _options(arguments: list[str] | None, checks: tuple[Check, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--result", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    names = [check.name for check in checks]
    for option, allowed in {"again": {*names, "failed"}, "only": {*names}}.items():
        if unknown := {*getattr(options, option)} - allowed:
            parser.error(f"--{option} {', '.join(sorted(unknown))}: no such check; there are {', '.join(names)}")
    return options


def visible_gpus() -> list[str]:
    """Name, memory, driver and compute capability of each GPU that processes of this machine see."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return lines if chosen is None else lines[: len([name for name in chosen.split(",") if name.strip()])]


def open_result(path: Path, fresh: Record) -> Record:
    """The result in a file, or a fresh one; SystemExit: the file is of another machine."""
    if not path.exists():
        return fresh
    result: Record = json.loads(path.read_text())
    if differing := [name for name in IDENTITY if result.get(name) != fresh[name]]:
        sys.exit(f"gpu-check: {path} differs from this machine in {', '.join(differing)}; give another --result")
    return result


def run(checks: list[Check], result: Record, options: argparse.Namespace) -> bool:
    """Run the checks that a result lacks, adding each to it and to the file; returns whether some are left."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a check become children of this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))  # and do not outlive it, either
    end = time.monotonic() + 60 * options.minutes
    records = result["checks"]
    for check in checks:
        verdict = records.get(check.name, {}).get("verdict", "not run")
        again = check.name in (*options.again, *options.only) or ("failed" in options.again and verdict == "fail")
        if verdict != "not run" and not again:
            continue
        if (limit_s := end - time.monotonic()) <= 0:
            return True
        record = run_check(check, len(result["gpus"]), options, limit_s)
        if record is None:
            return True
        records[check.name] = {
            **record,
            "commit": commit(ROOT),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        _write(options.result, result)
        print(f"{check.name}: {record['verdict']} {record.get('why', '')}", file=sys.stderr, flush=True)
    return False


def run_check(check: Check, gpus: int, options: argparse.Namespace, limit_s: float) -> Record | None:
    """The verdict on one check; None: it ran longer than is left to this call."""
    if missing := _missing(check, gpus, options.dry):
        return {"verdict": "not run", "why": missing}
    command = shlex.split((options.dry and check.dry_run) or check.run)
    deadline_s = check.deadline_s * (CPU_PATIENCE if options.dry else 1)
    tested = not command[0].startswith("benchmarks/")
    with tempfile.TemporaryDirectory() as folder:
        outcomes, printed = Path(folder, "outcomes"), Path(folder, "printed")
        if tested:
            # Not the repository's options: they ask for plugins of pytest that a machine with little more than torch
            # does without.
            plain = ["-o", "addopts=--import-mode=importlib", "-p", "tests.support.outcomes_file"]
            command = ["-m", "pytest", *command, *plain]
        environment = _environment(check, Path(folder), options.dry) | {"PYTEST_OUTCOMES_FILE": str(outcomes)}
        began = time.monotonic()
        with printed.open("wb") as file, options.result.with_suffix(".log").open("ab") as log:
            output = log if tested else file
            code = _exit_code([sys.executable, *command], environment, output, log, min(deadline_s, limit_s))
        seconds = time.monotonic() - began
        if code is None and limit_s < deadline_s:
            return None
        problem = ""
        if code is None:
            problem = f"killed after {deadline_s:g} s, its deadline"
        elif code not in (CODES if tested else (0,)):
            log_text = options.result.with_suffix(".log").read_text(errors="replace")
            problem = f"exit code {code}: {log_text[-2000:]}"
        if tested:
            lines = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
            record = _of_tests(lines, problem, options.dry)
        else:
            record = _of_benchmark(printed.read_text(), problem, options.dry)
    return {**record, "seconds": seconds, **({"dry": check.dry} if options.dry else {})}


def _missing(check: Check, gpus: int, dry: bool) -> str:
    """Why a check cannot run here; "": it can."""
    if dry and not check.dry:
        return "needs a GPU: nothing stands in for it"
    if not dry and gpus < check.gpus:
        return f"needs {check.gpus} GPUs, and this machine has {gpus}"
    missing = [name for name in check.needs if not (_importable(name) or (dry and name in CUDA_ONLY))]
    return f"needs {', '.join(missing)}" if missing else ""


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package around it
        return False


def _environment(check: Check, folder: Path, dry: bool) -> dict[str, str]:
    """Of a check's processes; `folder` may be used until it ends."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if not _importable("megatron_grpo_kernels"):  # the package is not installed, and this is another name of a folder
        (folder / "megatron_grpo_kernels").symlink_to(ROOT / "kernels")
        paths.insert(0, str(folder))
    # Whatever plugins of pytest a machine has are left out: the checks need none, and one that fails ends them all.
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if dry:
        variables |= {DRY: check.dry, "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"TRITON_INTERPRET": "1"} if check.dry == "interpreter" else {}
    return variables


def _exit_code(command: list[str], environment: dict[str, str], out: Any, log: Any, limit_s: float) -> int | None:
    """Run a command in its own process group and end all that it started; None: it was late."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=log, process_group=0)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for _ in range(KILLS):
            children = psutil.Process().children(recursive=True)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=5)


def _of_tests(outcomes: list[Record], problem: str, dry: bool) -> Record:
    """The verdict on a check from what its tests told (`tests.support.outcomes_file`) and why pytest did not end well.

    A test that ends by skipping with a reason that begins with "dry" has run without numbers.
    """
    verdicts = {"passed": "dry" if dry else "pass", "failed": "fail", "skipped": "not run", "started": "fail"}
    tests: dict[str, Record] = {}
    for outcome in outcomes:
        name = outcome.pop("test").removeprefix("tests/")
        verdict = verdicts[outcome.pop("outcome")]
        if verdict == "not run" and outcome["why"].startswith("dry"):
            verdict = "dry"
        tests[name] = {"verdict": verdict, "why": problem, **outcome}
        if not tests[name]["why"]:
            del tests[name]["why"]
    return _summed_up(tests, problem)


def _summed_up(tests: dict[str, Record], problem: str) -> Record:
    verdicts = {test["verdict"] for test in tests.values()}
    failures = {name: test["why"] for name, test in tests.items() if test["verdict"] == "fail"}
    if not failures and problem:
        failures = {"pytest": problem}
    if failures:
        name, why = next(iter(failures.items()))
        return {"verdict": "fail", "why": f"{len(failures)} failed, first {name}: {why}", "tests": tests}
    if verdicts & {"pass", "dry"}:
        return {"verdict": "dry" if "dry" in verdicts else "pass", "tests": tests}
    reasons = sorted({test["why"] for test in tests.values()})
    return {"verdict": "not run", "why": "; ".join(reasons) or "no test was found", "tests": tests}


def _of_benchmark(printed: str, problem: str, dry: bool) -> Record:
    """The verdict on a benchmark, which prints a JSON, or has a problem."""
    if problem:
        return {"verdict": "fail", "why": problem}
    try:
        return {"verdict": "dry" if dry else "pass", "numbers": json.loads(printed)}
    except json.JSONDecodeError:
        return {"verdict": "fail", "why": f"printed no JSON: {printed[-2000:]}"}


def _write(path: Path, result: Record) -> None:
    """At once or not at all, so that a call that is killed meanwhile leaves the file before it."""
    written = path.with_suffix(".new")
    written.write_text(json.dumps(result, indent=2) + "\n")
    written.replace(path)


if __name__ == "__main__":
    sys.exit(main())
