"""The sampling part of a step with a fake collector: seeds, the cache across batches and restarts, limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_grpo.algorithms.sampling import sample_step

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.schema import Config, GRPOConfig
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.run.save_state import default_grpo_save_state
from tests.support.trajectories import make_trajectory

SAMPLES = 2


class Collector:
    """Answers prompt i with rewards (0, 1) when i is even: those groups have a signal."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def collect(
        self, prompts: list[dict[str, int]], *, samples_per_prompt: int, step: int, **_: Any
    ) -> list[Trajectory]:
        self.steps.append(step)
        return [
            make_trajectory(
                prompt_idx=prompt["idx"],
                group=group,
                sample=sample,
                reward=float(sample) if prompt["idx"] % 2 == 0 else 1.0,
            )
            for group, prompt in enumerate(prompts)
            for sample in range(samples_per_prompt)
        ]


def make_run(tmp_path: Path, **settings: Any) -> Any:
    grpo = GRPOConfig(num_prompts_per_step=3, num_generations_per_prompt=SAMPLES, **settings)
    return SimpleNamespace(
        config=Config(grpo=grpo),
        state=default_grpo_save_state(),
        collector=Collector(),
        sampling=None,
        batch_cache=[],
        logger=SimpleNamespace(run_dir=tmp_path),
    )


def batches(*rows: list[int]) -> Iterator[Any]:
    return iter([[{"idx": idx} for idx in row] for row in rows])


def prompts_of(trajectories: list[Trajectory]) -> list[int]:
    assert [one.sample for one in trajectories] == list(range(SAMPLES)) * (len(trajectories) // SAMPLES)
    return [one.prompt_idx for one in trajectories[::SAMPLES]]


def test_without_dynamic_sampling_a_step_is_a_generation_batch(tmp_path: Path) -> None:
    run, source = make_run(tmp_path), batches([1, 2, 3], [4, 5, 6])
    for expected in ([1, 2, 3], [4, 5, 6]):
        samples = sample_step(run, source, StepTimer())
        assert samples is not None
        assert prompts_of(samples.trajectories) == expected
        assert samples.metrics == {}
    assert sample_step(run, source, StepTimer()) is None
    assert run.collector.steps == [1, 2]
    assert run.state["consumed_samples"] == 6


def test_dynamic_sampling_fills_a_step_from_several_batches(tmp_path: Path) -> None:
    run = make_run(tmp_path, use_dynamic_sampling=True)
    source = batches([0, 1, 2], [3, 5, 7], [4, 6, 8], [10, 12, 14])
    samples = sample_step(run, source, StepTimer())
    assert samples is not None
    assert prompts_of(samples.trajectories) == [0, 2, 4]
    assert [one.group for one in samples.trajectories] == [0, 0, 1, 1, 2, 2]
    assert prompts_of(samples.sampled) == [0, 1, 2, 3, 5, 7, 4, 6, 8]
    assert samples.metrics == {
        "dynamic_sampling_gen_batches": 3.0,
        "dynamic_sampling_groups_without_signal": 4.0,
        "dynamic_sampling_groups_sliced": 2.0,
    }
    assert run.batch_cache == []
    samples = sample_step(run, source, StepTimer())
    assert samples is not None
    assert prompts_of(samples.trajectories) == [10, 12, 14]
    assert run.collector.steps == [1, 2, 3, 4], "every generation batch draws with seeds of its own"
    assert run.state["consumed_samples"] == 12


def test_what_waits_when_the_data_ends_is_there_after_a_restart(tmp_path: Path) -> None:
    run = make_run(tmp_path, use_dynamic_sampling=True)
    assert sample_step(run, batches([0, 1, 2]), StepTimer()) is None
    saved = json.dumps([[one.to_row() for one in group] for group in run.batch_cache])
    resumed = make_run(tmp_path, use_dynamic_sampling=True)
    resumed.state = json.loads(json.dumps(run.state))
    resumed.batch_cache = [[Trajectory.from_row(row) for row in group] for group in json.loads(saved)]
    continued = sample_step(resumed, batches([4, 6, 8]), StepTimer())
    straight = sample_step(make_run(tmp_path, use_dynamic_sampling=True), batches([0, 1, 2], [4, 6, 8]), StepTimer())
    assert continued is not None
    assert straight is not None
    assert continued.trajectories == straight.trajectories
    assert resumed.collector.steps == [2]


def test_a_step_that_does_not_fill_up_ends_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2)
    with pytest.raises(SamplingError, match=r"found 1 of the 3 prompts of a step in .*max_gen_batches=2"):
        sample_step(run, batches([0, 1, 3], [5, 7, 9], [2, 4, 6]), StepTimer())
