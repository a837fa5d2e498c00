"""A run ends while its last save still fits into its job."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms import loop
from megatron_grpo.run import job_time
from megatron_grpo.run.directory import OUT_OF_TIME_FILE, lock_run_directory
from megatron_grpo.run.job_time import END_VARIABLE, JobTime
from tests.support.loop_run import LIMITS, Run, validating

NOW = 1_900_000_000.0


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_time, "time", SimpleNamespace(time=lambda: NOW))


@pytest.mark.parametrize(
    ("left_s", "save_s", "ends"),
    [(900, 200, False), (899, 200, True), (1200, None, False), (1199, None, True), (600, 0, False), (599, 0, True)],
)
def test_a_further_step_and_its_save_have_to_fit(left_s: float, save_s: float | None, ends: bool) -> None:
    time = JobTime(NOW + left_s)
    assert time.explain_end(save_s) is None, "how long a step takes is not known"
    for seconds in (100, 400, 300):
        time.note_step(seconds)
    reason = time.explain_end(save_s)
    assert (reason is not None) == ends
    assert reason is None or f"ends in {left_s} s ({END_VARIABLE}), and a step takes up to 400 s" in reason


@pytest.mark.parametrize(("value", "end"), [("1900000500", 1_900_000_500.0), ("", None), ("Unknown", None)])
def test_the_end_is_slurms(value: str, end: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(END_VARIABLE, value)
    assert JobTime.from_environment().end == end
    monkeypatch.delenv(END_VARIABLE)
    assert JobTime.from_environment().end is None


def test_a_loop_ends_in_time_saves_and_tells_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 540 s has four steps of 100 s and a save of 60 s, no fifth step."""
    validating(monkeypatch, AssertionError("there is no time for it"))
    run = Run(tmp_path, replace(LIMITS, val_at_end=True))
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(job_time, "time", SimpleNamespace(time=lambda: NOW + clock.now))
    monkeypatch.setenv(END_VARIABLE, str(int(NOW + 540)))

    def observe(_: Any) -> None:  # once a step
        clock.now += 100

    monkeypatch.setattr(run.loader, "observe", observe)
    finish = run.checkpointer.finish

    def save() -> None:
        finish()
        run.checkpointer.save_s.update(dict.fromkeys(run.checkpointer.save_s, 60.0))

    monkeypatch.setattr(run.checkpointer, "finish", save)
    run.train()
    assert run.ends[0][1].startswith("the job ends in 140 s")
    assert run.checkpointer.list_steps() == [2, 4]
    assert (tmp_path / OUT_OF_TIME_FILE).exists()
    with lock_run_directory(str(tmp_path)):
        assert not (tmp_path / OUT_OF_TIME_FILE).exists(), "the next start has its own job"
