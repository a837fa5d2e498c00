"""Logs of processes that are forked from one that logs already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, read_heartbeats
from megatron_grpo.cluster.process_log import FOLDER_VARIABLE, LEVEL_VARIABLE

FORKS = """
import logging, os, time
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log

begin_process_log("parent")
time.sleep(0.2)  # its heartbeat has wound up the clock of the stacks: a thread that a fork does not take along
for number in range(3):
    with phase("fork"):
        child = os.fork()
    if child == 0:
        begin_process_log(f"child {number}")
        logging.getLogger("megatron_grpo.test").info("child %d speaks", number)
        with phase("live"):
            time.sleep(0.2)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
logging.getLogger("megatron_grpo.test").info("the parent speaks")
"""


def test_a_forked_process_has_a_log_and_a_heartbeat_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path), LEVEL_VARIABLE: "info"}
    subprocess.run([sys.executable, "-c", FORKS], env=environment, check=True, timeout=60)
    parent = (tmp_path / "parent.log").read_text()
    assert "the parent speaks" in parent
    assert not any(f"child {number}" in parent for number in range(3))
    heartbeats = read_heartbeats(tmp_path / HEARTBEATS_FOLDER)
    for number in range(3):
        log = (tmp_path / f"child_{number}.log").read_text()
        assert f"child {number} speaks" in log
        assert "parent" not in log
        assert "fork" not in [one.name for one in heartbeats[f"child {number}"].phases], "a phase of the parent"
