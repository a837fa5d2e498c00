"""A process of a run is stopped: the run ends within its deadline, names process and phase, and leaves nobody."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, Heartbeat, read_heartbeats
from megatron_grpo.cluster.process_log import LOGS_FOLDER, build_log_path
from tests.integration.runs import TrainingRun

DEADLINE_S = 40
GRACE_S = 60
"""For what follows a deadline: stacks, saving the steps before it where the models are whole, ending every process."""

ROLLOUT_S = DEADLINE_S // 2
SCORING_S = 12
DEADLINES = (
    *(f"{key}.timeout_s={DEADLINE_S}" for key in ("policy", "generation", "refit")),
    f"rollouts.timeout_s={ROLLOUT_S}",  # the driver waits for two attempts
    f"env.addition.timeout_s={SCORING_S}",  # and an attempt for a process that takes the place of another
)
ENDLESS = ("grpo.max_num_steps=100000", "grpo.val_period=0", "grpo.num_prompts_per_step=16", "checkpointing=none")
STARTUP_S = 400
RESTART_S = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(STARTUP_S + 200)]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TrainingRun]:
    """One that trains and would do so for days; the parameter is how often its engine is replaced, else never."""
    restarts = getattr(request, "param", 0)
    run = TrainingRun(
        tmp_path / "run",
        *ENDLESS,
        *DEADLINES,
        f"generation.engine_restarts={restarts}",
        "cluster.max_restarts=0",
        "logger.level=debug",
    )
    run.start()
    try:
        run.wait_for(lambda: steps(run) >= 2, timeout_s=STARTUP_S)
        yield run
    finally:
        if run.driver.poll() is None:
            run.kill()


def steps(run: TrainingRun) -> int:
    return len(run.metrics()) if (run.run_dir / "metrics.jsonl").exists() else 0


def stop(run: TrainingRun, name: str) -> Heartbeat:
    """Stop the process whose name begins so."""
    beats = read_heartbeats(run.run_dir / LOGS_FOLDER / HEARTBEATS_FOLDER)
    (stopped,) = [beat for beat in beats.values() if beat.name.startswith(name)]
    psutil.Process(stopped.pid).send_signal(signal.SIGSTOP)
    return stopped


@pytest.mark.parametrize(
    "name", ["policy rank 1", "generation engine 0 worker 1", "generation engine 0 core", "rollout worker 0"]
)
def test_a_stopped_process_ends_the_run_within_its_deadline(run: TrainingRun, name: str) -> None:
    stopped, began = stop(run, name), time.monotonic()
    assert run.finish(timeout_s=DEADLINE_S + GRACE_S) == 1, run.log()
    ended = time.monotonic() - began
    message = run.log().strip().splitlines()[-1]
    print(f"{name}: ended after {ended:.1f} s: {message}")
    run.assert_nothing_left(within_s=2.0)
    assert message.startswith("run failed: "), run.log()
    assert f"{name} (pid {stopped.pid} on {stopped.host}) " in message
    assert " is in phase" in message or " after phase " in message
    assert "its process is stopped (SIGSTOP)" in message
    assert "Traceback" not in run.log(), run.log()
    assert ended >= ROLLOUT_S - 5, "something else than a deadline ended it"

    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    assert f"run failed: {summary['reason']}" == message
    assert summary["steps"] == steps(run)
    log = build_log_path(run.run_dir / LOGS_FOLDER, name).read_text()
    assert "is overdue and this process is stopped; its stacks" in log


def test_a_stopped_engine_ends_the_run_within_its_deadline(run: TrainingRun) -> None:
    """The actor itself, which would have to end vLLM's processes."""
    beats = read_heartbeats(run.run_dir / LOGS_FOLDER / HEARTBEATS_FOLDER)
    psutil.Process(beats["generation engine 0"].pid).send_signal(signal.SIGSTOP)
    assert run.finish(timeout_s=DEADLINE_S + GRACE_S) == 1, run.log()
    run.assert_nothing_left(within_s=2.0)
    message = run.log().strip().splitlines()[-1]
    print(message)
    assert f"generation engine 0 (pid {beats['generation engine 0'].pid} on " in message
    assert "its process is stopped (SIGSTOP)" in message


@pytest.mark.parametrize("run", [1], indirect=True)
@pytest.mark.parametrize("name", ["generation engine 0 worker 1", "generation engine 0 core"])
def test_a_stopped_engine_process_is_replaced(run: TrainingRun, name: str) -> None:
    """With its whole engine, at the first deadline that passes; the second time the run ends."""
    stopped, before = stop(run, name), steps(run)
    run.wait_for(lambda: steps(run) >= before + 3, timeout_s=DEADLINE_S + RESTART_S)
    assert not psutil.pid_exists(stopped.pid)
    assert sum(row["engine_restarts"] for row in run.metrics()) == 1
    assert sum(row["failed_rollouts"] for row in run.metrics()) == 0
    description = f"{name} (pid {stopped.pid} on {stopped.host}) "
    assert any("generation engine 0 was replaced: " in line and description in line for line in run.log().splitlines())
    stop(run, name)
    assert run.finish(timeout_s=DEADLINE_S + GRACE_S) == 1, run.log()
    run.assert_nothing_left(within_s=2.0)
    message = run.log().strip().splitlines()[-1]
    assert "it was replaced as often as generation.engine_restarts=1 allows" in message
    assert "Traceback" not in run.log(), run.log()


def test_a_stopped_environment_process_is_replaced(run: TrainingRun) -> None:
    """Scoring needs no more than another process: the run goes on, and the log says what happened."""
    stopped, before = stop(run, "environment addition worker"), steps(run)
    run.wait_for(lambda: steps(run) >= before + 3, timeout_s=DEADLINE_S + GRACE_S)
    assert not psutil.pid_exists(stopped.pid)
    log = build_log_path(run.run_dir / LOGS_FOLDER, "rollout worker 0").read_text()
    message = f"scoring: no answer from {stopped.name} within {SCORING_S} s; {stopped.name} (pid {stopped.pid} on "
    assert message in log
    assert ": its process is stopped (SIGSTOP)" in log
    assert message in run.log(), "whoever watches the run is told, too"
    run.driver.send_signal(signal.SIGTERM)
    assert run.finish(timeout_s=60) == 143, run.log()
    run.assert_nothing_left(within_s=2.0)
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["reason"]) == ("interrupted", "SIGTERM")
    assert summary["steps"] == steps(run)
