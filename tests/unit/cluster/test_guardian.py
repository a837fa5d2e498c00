"""The guardian ends a killed driver's processes, grandchildren included, and leaves those of one that cleaned up."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from megatron_grpo.cluster.guardian import REFRESH_S

# The child ignores SIGTERM and has a session of its own; its child outlives it.
CHILD = "import subprocess, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"
DRIVER = f"""
import subprocess, sys, time
from megatron_grpo.cluster.guardian import guarded
with guarded():
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
    print("up", flush=True)
    sys.stdin.readline()
print("left", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "cleaned up"])
def test_processes_end_with_a_killed_driver_only(killed: bool) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    time.sleep(2 * REFRESH_S)
    family = psutil.Process(driver.pid).children(recursive=True)
    sleepers = [process for process in family if "guardian" not in " ".join(process.cmdline())]
    assert len(sleepers) == 2
    if not killed:
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "left\n"
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=20 if killed else 8)
    for process in alive:
        process.kill()
    assert set(alive) == (set() if killed else set(sleepers))
