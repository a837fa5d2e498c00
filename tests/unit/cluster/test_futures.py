"""Waiting for remote work: who is named when it does not come. Ray is played; tests/integration has a real one."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from megatron_grpo.cluster import futures
from megatron_grpo.cluster.futures import MAX_NAMES, gather, join_names
from megatron_grpo.cluster.process_log import build_log_path, driver_log
from megatron_grpo.config.errors import RunError
from tests.support.logged_processes import SLEEPS, logged_processes

NEVER = object()


def play_ray(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
    """References are names; an answer is a value, something to raise, or NEVER."""

    def wait(refs: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = [ref for ref in refs if answers[ref] is not NEVER][:num_returns]
        if not done:
            time.sleep(timeout)
        return done, [ref for ref in refs if ref not in done]

    def get(refs: str | list[str], timeout: float | None = None) -> Any:
        """As Ray's: a failure is raised at once, beside calls that are not over."""
        wanted = [refs] if isinstance(refs, str) else refs
        for ref in wanted:
            if isinstance(answers[ref], Exception):
                raise answers[ref]
        if any(answers[ref] is NEVER for ref in wanted):
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
        processes[process(1)].send_signal(signal.SIGSTOP)
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
        processes["rank 1"].send_signal(signal.SIGSTOP)
        time.sleep(0.1)
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
