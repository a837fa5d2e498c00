"""Jobs of a Ray cluster that runs already, by its job server."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.launch.launch_request import Request, find_slurm_settings
from megatron_grpo.launch.target import Launch, Target

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ADDRESS_VARIABLE, LOCAL_ADDRESS = "RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265"

T = TypeVar("T")


class RayTarget(Target):
    """Jobs of a Ray cluster, whose machines may have other files than this one."""

    name = "ray"
    file_name = "entrypoint.sh"
    reach = "nothing"

    def find_problems(self, config: Config) -> Iterator[Problem]:
        """Find settings that a job of a running cluster cannot have."""
        yield from find_slurm_settings(config)
        for name in ("image", "generation_nodes", "time_limit_s"):
            value = getattr(config.launch, name)
            if value is not None:
                yield Problem(f"launch.{name}={value}", "cannot be chosen in a cluster that runs already; leave it out")

    def render(self, request: Request) -> str:
        """Write the command that the head starts."""
        folder = request.config.launch.ray.folder or str(request.folder)
        return f"cd {shlex.quote(folder)} && exec {shlex.join(request.command)}\n"

    def submit(self, request: Request, file: Path) -> Launch:
        """Submit the command; RunError: no job server accepts it."""
        address = request.config.launch.ray.address or os.environ.get(ADDRESS_VARIABLE, LOCAL_ADDRESS)
        entrypoint = file.read_text(encoding="utf-8").strip()
        metadata = {"run_dir": request.run_dir}
        job = _ask(address, lambda client: client.submit_job(entrypoint=entrypoint, metadata=metadata))
        return Launch(request.local_run_dir, self.name, job, str(request.folder), settings={"address": address})

    def describe(self, launch: Launch) -> str:
        """Describe the state of a job."""
        info = _ask(_find_address(launch), lambda client: client.get_job_info(launch.job))
        state = str(info.status.value).lower()
        return f"job {launch.job} is {state}" + (f": {info.message}" if info.message and state != "running" else "")

    def cancel(self, launch: Launch) -> None:
        """End the driver of a job."""
        _ask(_find_address(launch), lambda client: client.stop_job(launch.job))

    def print_log(self, launch: Launch, process: str | None, lines: int, follow: bool) -> int:
        """Print the driver's output from the job server, or the log of a process."""
        if process is not None:
            return super().print_log(launch, process, lines, follow)
        address = _find_address(launch)
        text = _ask(address, lambda client: client.get_job_logs(launch.job))
        print(*text.splitlines()[-lines:], sep="\n", flush=True)
        if follow:
            _ask(address, lambda client: asyncio.run(_print_new_output(client, launch.job, len(text))))
        return 0


def _find_address(launch: Launch) -> str:
    """Find the job server of a launch; ValueError: the record alone names it.

    The client sends its token there, and the folder of a run may be from elsewhere.
    """
    recorded = launch.settings["address"]
    if (
        urlsplit(recorded).hostname not in ("127.0.0.1", "localhost", "::1")
        and os.environ.get(ADDRESS_VARIABLE) is None
    ):
        raise ValueError(f"{launch.run_dir} was launched to {recorded}: set {ADDRESS_VARIABLE} to it if you trust it")
    return os.environ.get(ADDRESS_VARIABLE, recorded)


async def _print_new_output(client: JobSubmissionClient, job: str, printed: int) -> None:
    """Print the output of a job from a character on, until the job ends."""
    async for text in client.tail_job_logs(job):
        print(text[printed:], end="", flush=True)
        printed = max(0, printed - len(text))


def _ask(address: str, ask: Callable[[JobSubmissionClient], T]) -> T:
    """Ask a job server; RunError: it does not answer, or refuses."""
    from ray.job_submission import JobSubmissionClient  # here, because Ray takes long to import

    try:
        return ask(JobSubmissionClient(address))
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = re.sub(r"\s+", " ", str(error)).strip()
        raise RunError(f"Ray's job server at {address}: {reason}; launch.ray.address names it") from None
