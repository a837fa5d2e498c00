"""Engines: counts, processes, experts, and what the failure of one means for others."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ray.exceptions import ActorDiedError
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from megatron_grpo.cluster.actor_processes import ActorProcesses, end_processes
from megatron_grpo.cluster.cleanup import find_shared_files
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation import engine_statistics, vllm_generation
from megatron_grpo.generation.cpu_worker import localize_choices
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.engine_interface import EngineStart
from megatron_grpo.generation.engine_statistics import EngineStatistics
from megatron_grpo.generation.vllm_generation import AddedEngine, VllmGeneration
from tests.support.refit_processes import PlayedRay

FAMILY = """
import subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.ensure_running = resource_tracker.register = lambda *_: None
memory = shared_memory.SharedMemory(create=True, size=16)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(memory.name, flush=True)
time.sleep(300)
"""


@contextmanager
def family() -> Iterator[tuple[list[psutil.Process], Path]]:
    """A process with a child, and the file of the memory that it shares."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        segment = Path("/dev/shm") / parent.stdout.readline().strip()
        process = psutil.Process(parent.pid)
        members = [process, *process.children(recursive=True)]
        try:
            yield members, segment
        finally:
            for member in members:
                if member.is_running():
                    member.kill()
            segment.unlink(missing_ok=True)


def collect_engines(processes: list[psutil.Process], later_s: float = 0.0) -> ActorProcesses:
    return ActorProcesses("here", tuple((process.pid, process.create_time() + later_s) for process in processes))


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_children_and_stopped_processes_end_and_what_they_shared_is_freed() -> None:
    with family() as (members, segment):
        assert len(members) == 2
        assert segment.exists()
        members[1].send_signal(signal.SIGSTOP)
        assert end_processes(collect_engines(members[:1])) == [], "the child is found although nobody named it"
        assert all(map(is_gone, members))
        assert not segment.exists()


def test_what_outlived_its_parent_ends_too() -> None:
    with family() as (members, _):
        engine = collect_engines(members)
        members[0].kill()
        deadline = time.monotonic() + 10
        while not is_gone(members[0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_gone(members[1])
        assert end_processes(engine) == []
        assert is_gone(members[1])


def test_a_younger_process_with_a_number_that_was_used_before_is_left_alone() -> None:
    with family() as (members, segment):
        assert end_processes(collect_engines(members, later_s=-100.0)) == []
        assert not any(map(is_gone, members))
        assert segment.exists()


def test_all_kinds_of_shared_memory_that_vllm_leaves_are_found() -> None:
    stem = f"/dev/shm/{os.getpid()}"
    files = [Path(f"{stem}-[0-1]-cpushm_0"), Path(f"/dev/shm/sem.mp-{os.getpid()}"), Path(f"{stem}-other")]
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.unlink, missing_ok=True)
            file.write_bytes(bytes(mmap.PAGESIZE))
            stack.enter_context(mmap.mmap(stack.enter_context(file.open("r+b")).fileno(), 0))
        process = psutil.Process()
        assert find_shared_files(process) & {*files} == {files[0]}
        assert find_shared_files(process, with_semaphores=True) & {*files} == {*files[:2]}


def make_statistics(running: int, waiting: int, usage: float, looked_up: int = 0, hits: int = 0) -> SchedulerStats:
    prefix = PrefixCacheStats(queries=looked_up, hits=hits)
    return SchedulerStats(
        num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage, prefix_cache_stats=prefix
    )


def test_peaks_and_sums_since_the_last_look() -> None:
    statistics = EngineStatistics()
    statistics.record(make_statistics(3, 5, 0.25, looked_up=40, hits=10), None)
    statistics.record(None, None)
    statistics.record(make_statistics(8, 0, 0.125, looked_up=20, hits=20), None, mm_cache_stats=None, engine_idx=0)
    statistics.count_tokens(7)
    statistics.count_tokens(4)
    figures = statistics.take()
    assert (figures.running, figures.waiting, figures.kv_cache_usage) == (8, 5, 0.25)
    assert (figures.prefix_tokens, figures.prefix_hits, figures.tokens, figures.drafted) == (60, 30, 11, 0)
    assert statistics.take().running == 0


def test_proposed_tokens() -> None:
    statistics, drafts = EngineStatistics(), SpecDecodingStats.new(4)
    drafts.observe_draft(num_draft_tokens=4, num_accepted_tokens=1)
    stats = make_statistics(1, 0, 0.0)
    stats.spec_decoding_stats = drafts
    statistics.record(stats, None)
    figures = statistics.take()
    assert (figures.drafted, figures.accepted) == (4, 1)


def test_only_time_with_requests_in_flight_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0, 21.0, 25.0, 26.0])
    monkeypatch.setattr(engine_statistics.time, "monotonic", lambda: next(clock))
    statistics = EngineStatistics()
    statistics.set_in_flight(2)  # at 10
    statistics.set_in_flight(1)
    statistics.set_in_flight(0)  # at 13
    statistics.set_in_flight(0)
    statistics.set_in_flight(4)  # at 20
    assert statistics.take().busy_s == 4.0  # at 21
    statistics.set_in_flight(0)  # at 25
    assert statistics.take().busy_s == 4.0


@pytest.mark.parametrize("placement", [[[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]], [[5, 0, 1, 2], [4, 3]]])
def test_the_outputs_of_all_ranks_add_up_to_those_of_all_experts(placement: list[list[int]]) -> None:
    torch.manual_seed(0)
    hidden, matrices = torch.randn(9, 4), torch.randn(6, 4, 4)
    weights, chosen = torch.rand(9, 6).topk(3, dim=1)
    expected = torch.einsum("th,tchk,tc->tk", hidden, matrices[chosen], weights)
    total = torch.zeros_like(expected)
    for experts in placement:
        place_here = torch.full((6,), -1, dtype=torch.int32)
        place_here[experts] = torch.arange(len(experts), dtype=torch.int32)
        weights_here, chosen_here = localize_choices(weights, chosen.to(torch.int32), place_here, len(experts))
        assert chosen_here.dtype == torch.int32
        total += torch.einsum("th,tchk,tc->tk", hidden, matrices[experts][chosen_here.long()], weights_here)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("slowest_s", "expected"), [(89.0, 178.0), (10.0, 120.0), (1700.0, 3000.0)])
def test_a_new_engine_has_not_the_time_of_a_whole_run_to_start(slowest_s: float, expected: float) -> None:
    """All else waits for it, and one whose GPU is gone never starts."""
    generation = not_started(GenerationConfig(), startup_timeout_s=3000.0)
    processes = ActorProcesses("here", ())
    starts = [{"imports": 4.0, "processes": 5.0}, {"imports": 9.0, "processes": slowest_s - 9.0}]
    generation.starts = {number: EngineStart(seconds, processes, {}) for number, seconds in enumerate(starts)}
    assert generation.restart_timeout_s == expected


def not_started(config: GenerationConfig, startup_timeout_s: float = 1.0) -> VllmGeneration:
    return VllmGeneration(
        VllmSettings(
            model_path="model",
            config=config,
            precision="float32",
            max_total_sequence_length=8,
        ),
        actor_options=lambda _: {},
        startup_timeout_s=startup_timeout_s,
    )


@pytest.mark.parametrize(
    ("settings", "restarts", "message"),
    [
        ({"engine_restarts": 0}, 0, "it burns"),
        (
            {"engine_restarts": 3},
            3,
            "it burns; it was replaced as often as generation.engine_restarts=3 allows",
        ),
        ({"placement": "colocated"}, 0, "it burns; engines are not replaced with generation.placement=colocated"),
        ({"placement": "colocated", "engine_restarts": 0}, 0, "it burns"),
    ],
)
def test_an_engine_that_is_not_replaced_says_why(settings: dict[str, Any], restarts: int, message: str) -> None:
    generation = not_started(GenerationConfig(**settings))
    generation.restarts[0] = restarts
    with pytest.raises(RunError) as raised:
        generation.replace({0: "it burns"})
    assert str(raised.value) == message
    assert generation.restarts[0] == restarts


def test_added_engines_are_taken_over_as_they_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    played = SimpleNamespace(wait=PlayedRay.wait, get=PlayedRay.get, kill=killed.append)
    monkeypatch.setattr(vllm_generation, "ray", played)
    generation = not_started(GenerationConfig(), startup_timeout_s=100.0)
    calls = {number: Future[EngineStart]() for number in (1, 2, 3, 4)}
    now = time.monotonic()
    generation.added = {  # the last one is late
        number: AddedEngine(f"actor {number}", call, now - (number == 4) * 101.0) for number, call in calls.items()
    }
    start = EngineStart({}, ActorProcesses("here", ()), {})
    calls[1].set_result(start)
    calls[2].set_exception(ActorDiedError())
    assert list(generation.take_added()) == [
        (1, None),
        (2, "it died (its process is gone)"),
        (4, "it did not start within cluster.startup_timeout_s=100"),
    ]
    assert (generation.engines, generation.starts, killed) == ({1: "actor 1"}, {1: start}, ["actor 2", "actor 4"])
    assert list(generation.added) == [3], "it is still starting"


def test_engines_beside_one_that_fails_are_asleep_before_others_have_their_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asleep: list[int] = []

    def fails(calls: list[int], **_: Any) -> None:
        raise RunError("engine 0 is lost")

    def wait(calls: list[int], *, num_returns: int, timeout: float) -> None:
        assert num_returns == len(calls)
        asleep.extend(calls)

    generation = not_started(GenerationConfig())
    monkeypatch.setattr(generation, "submit", lambda *_: [0, 1, 2])
    monkeypatch.setattr("megatron_grpo.generation.vllm_generation.gather", fails)
    monkeypatch.setattr("megatron_grpo.generation.vllm_generation.ray.wait", wait)
    with pytest.raises(RunError, match="engine 0 is lost"):
        generation.sleep()
    assert asleep == [0, 1, 2]
