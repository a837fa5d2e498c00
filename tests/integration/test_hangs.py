"""A process of a run is stopped: the run ends within its deadline, names process and phase, and leaves nobody."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_grpo.cluster.heartbeat import FOLDER, read_heartbeats
from megatron_grpo.cluster.process_log import LOGS_FOLDER, log_file
from tests.integration.runs import TrainingRun

DEADLINE_S = 20
GRACE_S = 60
"""For what follows a deadline: stacks, saving the steps before it where the models are whole, ending every process."""

DEADLINES = [f"{key}.timeout_s={DEADLINE_S}" for key in ("policy", "generation", "refit", "env.addition")]
ENDLESS = ("grpo.max_num_steps=100000", "grpo.val_period=0", "grpo.num_prompts_per_step=16", "checkpointing=none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stopped",
    [
        "policy rank 1",
        "generation engine 0",
        "generation engine 0 worker 1",
        "environment addition worker 0",
    ],
)
def test_a_stopped_process_ends_the_run_within_its_deadline(stopped: str, tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", *ENDLESS, *DEADLINES)
    run.start()
    run.wait_for(lambda: (run.run_dir / "metrics.jsonl").exists() and len(run.metrics()) >= 2)
    logs = run.run_dir / LOGS_FOLDER
    heartbeat = read_heartbeats(logs / FOLDER)[stopped]
    psutil.Process(heartbeat.pid).send_signal(signal.SIGSTOP)
    began = time.monotonic()

    assert run.finish(timeout_s=DEADLINE_S + GRACE_S) == 1, run.log()
    ended = time.monotonic() - began
    run.assert_nothing_left(within_s=2.0)
    message = run.log().strip().splitlines()[-1]
    assert message.startswith("run failed: "), run.log()
    assert f"within {DEADLINE_S} s" in message
    assert f"{stopped} (pid {heartbeat.pid} on {heartbeat.host}) is in phase" in message or "waits for work" in message
    assert "its process is stopped (SIGSTOP)" in message
    assert "Traceback" not in run.log(), run.log()
    assert ended >= DEADLINE_S - 1, f"{ended} s: something else than the deadline ended it: {message}"

    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert f"run failed: {summary['reason']}" == message
    assert summary["steps"] == len(run.metrics())
    assert "and this process is stopped; its stacks" in log_file(logs, stopped).read_text()
    print(f"{stopped}: ended after {ended:.1f} s: {message}")
