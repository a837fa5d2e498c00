"""Runs on this machine that outlive the terminal."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatron_grpo.cluster.cleanup import is_alive as is_process_alive
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.launch.launch_request import Request, find_slurm_settings
from megatron_grpo.launch.target import OUTPUT_FILE, Launch, Target


class LocalTarget(Target):
    """Background processes, each of which is the driver of a run."""

    name = "local"
    file_name = "command.sh"
    reach = "machine"

    def find_problems(self, config: Config) -> Iterator[Problem]:
        """Find settings that a process of this machine cannot have."""
        yield from find_slurm_settings(config)
        if config.launch.generation_nodes is not None:
            subject = f"launch.generation_nodes={config.launch.generation_nodes}"
            yield Problem(subject, "needs several machines; use slurm or kubernetes")

    def render(self, request: Request) -> str:
        """Write the command."""
        return f"cd {shlex.quote(str(request.folder))} && exec {shlex.join(_build_command(request))}\n"

    def submit(self, request: Request, file: Path) -> Launch:
        """Start the command in the background, with its output in a file."""
        with (request.local_run_dir / OUTPUT_FILE).open("ab") as output:
            process = subprocess.Popen(
                _build_command(request), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        # The number alone may be another process's by the time of `stop`.
        job = f"{process.pid}:{psutil.Process(process.pid).create_time()}"
        return Launch(request.local_run_dir, self.name, job, str(request.folder))

    def describe(self, launch: Launch) -> str:
        """Say whether the process lives."""
        process = _find_process(launch)
        return f"process {launch.job.partition(':')[0]} " + ("has ended" if process is None else "is running")

    def cancel(self, launch: Launch) -> None:
        """Let the driver end itself and its processes."""
        process = _find_process(launch)
        if process is not None:
            process.terminate()


def _build_command(request: Request) -> list[str]:
    # The interpreter is this one: a recorded run chooses no program of this machine.
    return [sys.executable, *request.command[1:]]


def _find_process(launch: Launch) -> psutil.Process | None:
    """Find the living process of a launch."""
    number, _, began = launch.job.partition(":")
    try:
        process = psutil.Process(int(number))
        return process if process.create_time() == float(began) and is_process_alive(process) else None
    except (psutil.NoSuchProcess, ValueError):
        return None
