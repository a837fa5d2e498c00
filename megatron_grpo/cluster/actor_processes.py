"""The processes of Ray actors: how the driver ends those that may no longer answer, and waits for new ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_grpo.cluster.cleanup import find_shared_files, is_alive, remove_segments
from megatron_grpo.cluster.futures import gather
from megatron_grpo.config.errors import RunError

END_S = 20.0  # for killed processes to disappear; a process inside a device driver's call ends when it returns
TASK_S = 10.0  # for Ray to begin a task that ends processes
POLL_S = 0.05
RESTART_RATIO, LEAST_RESTART_S = 2.0, 120.0  # of a new actor's deadline, by the seconds that starts have taken

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActorProcesses:
    """An actor's process and its children, on the actor's machine."""

    node: str  # Ray's name of the machine
    started: tuple[tuple[int, float], ...]
    """Pid and start time (seconds since the epoch) of each process; the time is needed because pids are reused."""


def list_own_processes() -> ActorProcesses:
    actor, started = psutil.Process(), []
    for process in [actor, *actor.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            started.append((process.pid, process.create_time()))
    return ActorProcesses(ray.get_runtime_context().get_node_id(), tuple(started))


def end_processes(actor: ActorProcesses) -> list[int]:
    """Kill an actor's processes here; returns pids that survive."""
    family: set[psutil.Process] = set()
    # A pid may belong to another process by now; the start time tells.
    for pid, started in actor.started:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == started:
                family |= {process, *process.children(recursive=True)}
    segments = set().union(*(find_shared_files(process, with_semaphores=True) for process in family))
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + END_S
    while (alive := [process.pid for process in family if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    remove_segments(segments)
    return alive


def end_on_machines(actors: Mapping[str, ActorProcesses]) -> None:
    """Kill the processes of actors, by name, wherever they are."""
    # Ray asks an actor to end, which a stopped process never hears.
    tasks = {}
    for name, processes in actors.items():
        on_its_machine = NodeAffinitySchedulingStrategy(processes.node, soft=False)
        task = ray.remote(num_cpus=0)(end_processes).options(scheduling_strategy=on_its_machine)
        tasks[name] = task.remote(processes)
    for name, task in tasks.items():
        phase_name = f"ending {name}"
        try:
            (alive,) = gather([task], deadline_s=END_S + TASK_S, phase_name=phase_name, name=lambda _: "Ray")
        except RunError as error:  # the machine is gone or drains, and the processes end with it
            logger.warning("%s", error)
            continue
        if alive:
            logger.warning("%s: processes %s are still there", phase_name, alive)


def compute_restart_timeout(startup_timeout_s: float, startup_s: Iterable[Mapping[str, float]]) -> float:
    """Compute the seconds that new actors may take to start.

    `startup_s`: seconds of the parts of each earlier start. The deadline is a multiple of the slowest: the whole run
    waits for it, and an actor whose GPU or machine is gone never starts.
    """
    slowest_s = max((sum(seconds.values()) for seconds in startup_s), default=startup_timeout_s)
    return min(startup_timeout_s, max(LEAST_RESTART_S, RESTART_RATIO * slowest_s))
