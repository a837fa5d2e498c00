"""Starts the same program in our sandbox, in bubblewrap and in nsjail, and tries what each limits; prints JSON.

    python benchmarks/sandbox_startup.py [--programs 50] [--python /usr/bin/python3]

All get one interpreter, the system's folders and an own folder in memory of 64 MiB, without network. `milliseconds` are
the median by the clock and the mean of processor time for one empty program; starters take turns, so that all see the
same load. `ratio` is the processor time of a starter divided by that of our level `namespaces`, which does what
bubblewrap does; our level `filtered` adds a filter of system calls. `holds` is what a hostile program reaches: the user
as which it runs; empty files in its folder, of 20,000; processes at the same time, of 100; MiB of memory, of 1,024. A
starter that is missing is "not installed". Bubblewrap limits neither processes nor memory, so it also runs `prlimit`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from header import header

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.environments.sandbox.kernel import adopt_orphans
from megatron_grpo.environments.sandbox.sandbox import Sandbox

LIMITS = SandboxConfig(wall_time_s=60.0, cpu_time_s=60, memory_mb=256, folder_mb=64)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
HOLDS = """
import os, signal
def files():
    count = 0
    try:
        for count in range(20000): open(f'{count}', 'w').close()
    except OSError: return count
    return count + 1
def processes():
    children = []
    try:
        for _ in range(100):
            child = os.fork()
            if child == 0: signal.pause()
            children.append(child)
    except OSError: pass
    for child in children: os.kill(child, 9)
    return len(children)
def memory():
    held = []
    try:
        for _ in range(1024): held.append(bytearray(os.urandom(1)) * (1 << 20))
    except MemoryError: pass
    return len(held)
for name, reach in dict(user=os.getuid, files=files, processes=processes, memory_mib=memory).items():
    print(name, reach(), flush=True)
"""
Start = Callable[[str], str]


def main() -> None:
    options = _options()
    adopt_orphans()
    ours = {level: Sandbox(LIMITS, level, options.python) for level in ("namespaces", "filtered")}
    limits = ["prlimit", "--nproc=16", f"--data={LIMITS.memory_mb << 20}"]
    starters: dict[str, Start | None] = {
        "ours, namespaces": lambda source: ours["namespaces"].run_python(source).stdout,
        "ours, filtered": lambda source: ours["filtered"].run_python(source).stdout,
        "ours, filtered, no cgroup": _without_group(ours["filtered"]),
        "bubblewrap": _bubblewrap(options.python, []),
        "bubblewrap, prlimit": _bubblewrap(options.python, limits),
        "nsjail": _nsjail(options.python),
    }
    installed = {name: start for name, start in starters.items() if start is not None}
    times = _times(installed, options.programs)
    base = times["ours, namespaces"]["processor"]
    measured = {
        name: {
            "milliseconds": times[name],
            "ratio": round(times[name]["processor"] / base, 2),
            "holds": _holds(start),
        }
        for name, start in installed.items()
    }
    result = {name: measured.get(name, "not installed") for name in starters}
    print(json.dumps({**header("sandbox_startup"), "load": os.getloadavg()[0], **result}, indent=2))


def _times(starters: dict[str, Start], programs: int) -> dict[str, dict[str, float]]:
    """Median of the milliseconds by the clock and mean of those of processor time, for each starter."""
    clock: dict[str, list[float]] = {name: [] for name in starters}
    processor = dict.fromkeys(starters, 0.0)
    for _ in range(programs):
        for name, start in starters.items():
            used, begun = _processor_s(), time.perf_counter()
            assert start("print('ready')") == "ready\n", f"{name} does not run"
            clock[name].append(time.perf_counter() - begun)
            _reap()
            processor[name] += _processor_s() - used
    return {
        name: {
            "clock": round(1000 * statistics.median(clock[name]), 1),
            "processor": round(1000 * processor[name] / programs, 1),
        }
        for name in starters
    }


def _holds(start: Start) -> dict[str, Any]:
    """What the hostile program reached; "killed" where that was its end."""
    reached: dict[str, Any] = dict.fromkeys(("user", "files", "processes", "memory_mib"), "killed")
    return reached | {name: int(count) for name, count in map(str.split, start(HOLDS).splitlines())}


def _reap() -> None:
    """Wait for processes that a starter left to this one, so that their processor time counts."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


def _processor_s() -> float:
    """Processor time of this process and of all that it waited for, in seconds."""
    used = [resource.getrusage(usage_of) for usage_of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _without_group(sandbox: Sandbox) -> Start:
    """Our sandbox on a machine that allows no memory cgroup."""
    limited = Sandbox(LIMITS, sandbox.level, sandbox.python)
    limited._cgroup_parent = None
    return lambda source: limited.run_python(source).stdout


def _bubblewrap(python: str, prefix: list[str]) -> Start | None:
    """Bubblewrap with the view of our sandbox."""
    if shutil.which("bwrap") is None or (prefix and shutil.which(prefix[0]) is None):
        return None
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
    for path in filter(os.path.exists, SYSTEM):
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    command += ["--size", str(LIMITS.folder_mb << 20), "--tmpfs", "/program", "--chdir", "/program"]
    return lambda source: _read_answer([*command, *prefix, python, "-I", "-B", "-c", source])


def _nsjail(python: str) -> Start | None:
    """Nsjail with the view of our sandbox and its limits."""
    if shutil.which("nsjail") is None:
        return None
    command = ["nsjail", "-Mo", "-Q", "--iface_no_lo", f"--rlimit_as={LIMITS.memory_mb}", "--rlimit_nproc=16"]
    for path in filter(os.path.exists, SYSTEM):
        command += ["-R", path]
    command += ["-m", f"none:/program:tmpfs:size={LIMITS.folder_mb << 20}", "--cwd", "/program"]
    return lambda source: _read_answer([*command, "--", python, "-I", "-B", "-c", source])


def _read_answer(command: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(command, cwd=Path(folder), capture_output=True, text=True, check=False, timeout=60)
    return process.stdout


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=50)
    parser.add_argument("--python", default="/usr/bin/python3", help="interpreter that all starters can show")
    return parser.parse_args()


if __name__ == "__main__":
    main()
