"""Real training runs as a user starts them: a process of its own, watched from outside."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER
from megatron_grpo.cluster.process_log import LOGS_FOLDER

MARK = "MEGATRON_GRPO_TEST_RUN"
"""Environment variable that every process of a run inherits."""

STACKS_S = 5.0
"""Seconds in which a living process notices a request for its stacks, and writes them."""

SHORT = (
    "grpo.max_num_steps=6",
    "grpo.val_period=3",
    "grpo.max_val_samples=64",
    "grpo.num_prompts_per_step=16",
    "checkpointing.save_period=3",
    "checkpointing.keep_top_k=null",
)
"""Six steps with a validation and a checkpoint in the middle and at the end."""


class TrainingRun:
    """`python -m MODULE`, that of training or one like it, with a recipe that needs no download.

    Args:
        run_dir: the run's.
        overrides: of its configuration.
        recipe: from conf/exp.
        folder: in which it is started; None: the repository.
        module: that is run.
    """

    def __init__(
        self,
        run_dir: Path,
        *overrides: str,
        recipe: str = "quickstart",
        folder: Path | None = None,
        module: str = "megatron_grpo.train",
    ) -> None:
        self.run_dir, self.folder, self.module = run_dir, folder, module
        self.overrides = [f"+exp={recipe}", f"run_dir={run_dir}", "logger.progress=false", *overrides]
        self.mark = uuid.uuid4().hex
        self.descendants: list[psutil.Process] = []
        self.output = run_dir.with_name(f"{run_dir.name}.{self.mark[:6]}.log")

    def start(self) -> subprocess.Popen[bytes]:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.driver = subprocess.Popen(
            [sys.executable, "-m", self.module, *self.overrides],
            stdin=subprocess.DEVNULL,
            stdout=self.output.open("wb"),
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env={**os.environ, MARK: self.mark},
            start_new_session=True,
            preexec_fn=_restore_ctrl_c,
        )
        return self.driver

    def finish(self, timeout_s: float = 480.0) -> int:
        """Start if need be, and wait for the end; the exit code."""
        if not hasattr(self, "driver"):
            self.start()
        try:
            return self.driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stacks = self.stacks()
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.log()}\n{stacks}") from None

    def stacks(self) -> str:
        """The ends of all logs, after every process was asked to write its stacks there."""
        logs = self.run_dir / LOGS_FOLDER
        for request in (logs / HEARTBEATS_FOLDER).glob("*.requests"):
            with request.open("ab") as file:
                file.write(b"?")
        time.sleep(STACKS_S)
        ends = [f"{file.name}:\n{file.read_text(errors='replace')[-6000:]}" for file in sorted(logs.glob("*.log"))]
        return "\n\n".join(ends)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 300.0, every_s: float = 0.05) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.driver.poll() is None, f"the run ended too early:\n{self.log()}"
            assert time.monotonic() < end, f"nothing after {timeout_s} s:\n{self.log()}"
            time.sleep(every_s)
        self.descendants = psutil.Process(self.driver.pid).children(recursive=True)

    def kill(self) -> None:
        """What a machine does to a process: no chance to clean up."""
        self.driver.send_signal(signal.SIGKILL)
        self.driver.wait(10)

    def log(self) -> str:
        return self.output.read_text(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run_dir / "metrics.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The rollouts of a step in plain types, so that rows compare with ==."""
        rows = read_rollouts(self.run_dir, step)
        return [
            {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
            for row in rows
        ]

    def processes(self) -> list[psutil.Process]:
        """Every living process of the run, the driver included.

        Processes that rename themselves may overwrite their environment, so those that were children of the driver when
        `wait_for` returned are counted too.
        """
        processes = [
            descendant
            for descendant in self.descendants
            if descendant.is_running() and descendant.status() != psutil.STATUS_ZOMBIE
        ]
        for process in psutil.process_iter():
            try:
                is_marked = process.environ().get(MARK) == self.mark and process not in processes
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return processes

    def assert_nothing_left(self, within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while processes := self.processes():
            if time.monotonic() > end:
                described = [" ".join(process.cmdline())[:120] or process.name() for process in processes]
                for process in processes:
                    process.kill()
                raise AssertionError(f"{within_s} s after its end these are left of the run: {described}")
            time.sleep(0.2)


def _restore_ctrl_c() -> None:
    """A shell starts background jobs, these tests perhaps among them, deaf to Ctrl-C, and their children inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_timing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ("timing", "throughput")} for row in rows]
