"""Processes: allocators, logs of forked ones, imports, pickled values, calls of actors and with limits."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from megatron_grpo.cluster import futures
from megatron_grpo.cluster.actor_calls import call_actor, call_actor_for_many, stream_actor
from megatron_grpo.cluster.futures import IN_BAND_BYTES, MAX_NAMES, gather, join_names, wrap_for_pickling
from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, read_heartbeats
from megatron_grpo.cluster.limited_calls import LimitedCalls, LimitError
from megatron_grpo.cluster.process_log import FOLDER_VARIABLE, LEVEL_VARIABLE, build_log_path, driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import ClusterConfig
from tests.support.logged_processes import SLEEPS, logged_processes, stop
from tests.support.programs import read_programs
from tests.support.text_functions import (
    backtrack,
    become_large,
    compute,
    concatenate,
    fail,
    fail_oddly,
    make_state,
    refuse,
    sleep,
    tell_process,
)
from tests.support.trajectories import make_trajectory, plain

BUFFERS = read_programs("processes")["buffers"]


def count_page_faults(environment: dict[str, str]) -> list[int]:
    """Page faults of a first buffer of 64 MiB and of a second one, after the first is freed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-I", "-c", BUFFERS]
    process = subprocess.run(command, env=env | environment, capture_output=True, text=True, check=True)
    return [int(line) for line in process.stdout.split()]


def test_freed_memory_of_ranks_on_cpus_stays_mapped() -> None:
    cluster = RayCluster(ClusterConfig(gpus_per_node=0))
    environment = cluster.build_policy_options(0)["runtime_env"]["env_vars"]
    assert cluster.build_value_options(0)["runtime_env"]["env_vars"] == environment
    first, second = count_page_faults(environment)
    assert second < first / 4


def test_by_glibcs_defaults_it_does_not() -> None:
    """Guards the test above."""
    first, second = count_page_faults({})
    assert second > first / 2


FORKS = read_programs("processes")["forks"]


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
        assert "fork" not in [phase.name for phase in heartbeats[f"child {number}"].phases], "a phase of the parent"


@pytest.mark.parametrize(
    "module", ["megatron_grpo.rollouts.rollout_worker", "megatron_grpo.environments.environment_worker"]
)
def test_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def transmit(value: Any) -> tuple[Any, list[pickle.PickleBuffer]]:
    """What arrives, and the buffers that travelled beside it."""
    beside: list[pickle.PickleBuffer] = []
    data = pickle.dumps(wrap_for_pickling(value), protocol=5, buffer_callback=beside.append)
    return pickle.loads(data, buffers=beside), beside


def test_a_value_arrives_as_itself() -> None:
    groups = ([make_trajectory(3, reward=None), make_trajectory(1)], [])
    arrived, beside = transmit(groups)
    assert isinstance(arrived, tuple)
    assert [[plain(trajectory) for trajectory in group] for group in arrived] == [
        [plain(trajectory) for trajectory in group] for group in groups
    ]
    assert not beside, "small arrays are among the rest"


@pytest.mark.parametrize("excess_bytes", [0, 1])
def test_only_large_arrays_travel_beside_it(excess_bytes: int) -> None:
    array = np.arange(IN_BAND_BYTES + excess_bytes, dtype=np.uint8)
    arrived, beside = transmit([array, "text"])
    np.testing.assert_array_equal(arrived[0], array)
    assert len(beside) == excess_bytes
    assert np.shares_memory(arrived[0], array) == bool(excess_bytes)


class Sampler(Protocol):
    def sample(self, prompt: str, *, samples: int = 1) -> list[str]: ...


class FakeMethod:
    """A remote method, which answers with its options and arguments."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def options(self, **options: Any) -> "FakeMethod":
        return FakeMethod(**options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        call = (self._options, args, kwargs)
        results = self._options.get("num_returns", 1)
        return [call] * results if isinstance(results, int) and results > 1 else call


ACTOR = SimpleNamespace(sample=FakeMethod())


def test_a_call_has_its_arguments() -> None:
    assert call_actor(ACTOR, Sampler.sample, "a", samples=2) == ({}, ("a",), {"samples": 2})


def test_a_stream_is_a_generator_of_ray() -> None:
    assert stream_actor(ACTOR, Sampler.sample, "a") == ({"num_returns": "streaming"}, ("a",), {})


@pytest.mark.parametrize("results", [1, 3])
def test_many_results_have_a_reference_each(results: int) -> None:
    assert (
        call_actor_for_many(ACTOR, results, Sampler.sample, "a") == [({"num_returns": results}, ("a",), {})] * results
    )


NEVER = object()


def play_ray(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
    """References are names; an answer is a value, something to raise, or NEVER."""

    def wait(refs: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        ready = [ref for ref in refs if answers[ref] is not NEVER][:num_returns]
        if not ready:
            time.sleep(timeout)
        return ready, [ref for ref in refs if ref not in ready]

    def get(refs: str | list[str], timeout: float | None = None) -> Any:
        """As Ray's: a failure is raised at once, beside calls that are not over."""
        names = [refs] if isinstance(refs, str) else refs
        for ref in names:
            if isinstance(answers[ref], Exception):
                raise answers[ref]
        if any(answers[ref] is NEVER for ref in names):
            assert timeout is not None
            time.sleep(timeout)
            raise GetTimeoutError
        return answers[refs] if isinstance(refs, str) else [answers[ref] for ref in refs]

    monkeypatch.setattr(futures, "ray", SimpleNamespace(wait=wait, get=get, ObjectRef=str))


def test_results_come_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    play_ray(monkeypatch, {"b": 2, "a": 1})
    assert gather(["a", "b"], deadline_s=1, phase_name="training step") == [1, 2]
    assert gather([], deadline_s=1, phase_name="training step") == []


def test_late_workers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    play_ray(monkeypatch, {"a": 1, "b": NEVER})
    with pytest.raises(RunError, match=r"^training step: no answer from policy rank 1 within 0\.1 s$"):
        gather(["a", "b"], deadline_s=0.1, phase_name="training step", name="policy rank {}".format)


def test_where_late_workers_are_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play_ray(monkeypatch, {"a": 1, "b": NEVER})
    process = "environment math worker {}".format
    with driver_log(tmp_path, "debug") as folder, logged_processes(folder, {process(1): SLEEPS}) as processes:
        stop(processes[process(1)])
        with pytest.raises(RunError) as raised:
            gather(["a", "b"], deadline_s=0.3, phase_name="environment math", name=process)
    begin = "environment math: no answer from environment math worker 1 within 0.3 s; environment math worker 1 (pid "
    assert str(raised.value).startswith(begin)
    assert ": its process is stopped (SIGSTOP); stacks are in " in str(raised.value)
    log = build_log_path(folder, "driver").read_text()
    assert "environment math: waits up to 0.3 s for environment math worker 0, environment math worker 1" in log
    assert "environment math: begins" in log, "the driver's own phase"


def test_a_failure_is_told_at_once_with_who_hangs_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank whose peer is stopped may give up before the driver does."""
    gave_up = RayTaskError("train", "traceback", RuntimeError("connection timed out"))
    play_ray(monkeypatch, {"a": gave_up, "b": NEVER})
    with driver_log(tmp_path, "info") as folder, logged_processes(folder, {"rank 1": SLEEPS}) as processes:
        stop(processes["rank 1"])
        began = time.monotonic()
        with pytest.raises(RunError) as raised:
            gather(["a", "b"], deadline_s=60, phase_name="training step")
        assert time.monotonic() - began < 10
    assert str(raised.value).startswith(
        "training step: rank 0 failed with RuntimeError: connection timed out; rank 1 (pid "
    )
    assert str(raised.value).endswith(": its process is stopped (SIGSTOP)")


def test_a_death_is_told_with_what_the_process_last_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play_ray(monkeypatch, {"a": ActorDiedError()})
    with driver_log(tmp_path, "info") as folder, logged_processes(folder, {"rank 0": SLEEPS}) as processes:
        processes["rank 0"].kill()
        processes["rank 0"].wait()
        with pytest.raises(RunError, match=r"rank 0 died .*; rank 0 \(pid .* is in phase 'train'.*: its process is go"):
            gather(["a"], deadline_s=60, phase_name="training step")


def test_of_many_some_are_named() -> None:
    names = [f"rank {index}" for index in range(100)]
    assert join_names(names) == ", ".join(names[:MAX_NAMES]) + f" and {100 - MAX_NAMES} more"
    assert join_names(["worker 0", "worker 0"]) == "worker 0"


@pytest.fixture(scope="module")
def calls() -> Iterator[LimitedCalls]:
    calls = LimitedCalls(make_state, cpu_s=0.3, memory_mib=200, processes=4)
    yield calls
    calls.close()


def test_a_function_gets_the_state_and_answers(calls: LimitedCalls) -> None:
    assert calls.call(concatenate, "b", "c") == "abc"
    assert asyncio.run(calls.run(concatenate, "b", "c")) == "abc"
    seconds = timeit.repeat(lambda: calls.call(concatenate, "b", "c"), number=1, repeat=200)
    assert min(seconds) < 0.02


@pytest.mark.parametrize("function", [compute, backtrack])
def test_a_call_that_computes_too_long_is_ended_also_in_c_code(calls: LimitedCalls, function: Any) -> None:
    began = time.monotonic()
    with pytest.raises(LimitError, match=r"needs more than 0\.3 s of a processor or 200 MiB"):
        asyncio.run(calls.run(function))
    assert time.monotonic() - began < 10
    assert calls.call(concatenate, "b", "c") == "abc"


def test_a_call_that_takes_too_much_memory_fails(calls: LimitedCalls) -> None:
    with pytest.raises(LimitError, match="200 MiB"):
        calls.call(become_large, 3_000_000_000)
    assert calls.call(become_large, 1000) == 1000
    assert calls.call(concatenate, "b", "c") == "abc"


def test_waiting_counts_for_nothing(calls: LimitedCalls) -> None:
    """The limit is processor time, so a busy machine decides nothing."""
    assert calls.call(sleep, 0.8) == "rested"


def test_errors_are_those_of_the_function(calls: LimitedCalls) -> None:
    with pytest.raises(ValueError, match="not this"):
        calls.call(fail, "not this")
    with pytest.raises(RunError, match="OddError: odd"):
        calls.call(fail_oddly)


def test_a_process_that_died_while_idle_is_no_call_beyond_its_limits(calls: LimitedCalls) -> None:
    process = calls.call(tell_process)
    os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    assert calls.call(concatenate, "b", "c") == "abc"


async def test_ordinary_calls_pass_those_without_end(calls: LimitedCalls) -> None:
    endless = [asyncio.create_task(calls.run(compute)) for _ in range(8)]
    await asyncio.sleep(0)
    assert await calls.run(concatenate, "b", "c") == "abc"
    ended = sum(call.done() for call in endless)
    outcomes = await asyncio.gather(*endless, return_exceptions=True)
    assert all(isinstance(outcome, LimitError) for outcome in outcomes)
    assert ended <= 4


def test_the_error_of_the_state_is_raised() -> None:
    with pytest.raises(ValueError, match="no state"):
        LimitedCalls(refuse, cpu_s=1)


def test_nothing_stays() -> None:
    calls = LimitedCalls(make_state, cpu_s=1)
    process = calls.call(tell_process)
    calls.close()
    for _ in range(50):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.1)
    raise AssertionError("the process is still there")
