"""The sampling stage of a step with fake rollouts: seeds, the cache across batches and restarts, limits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms import samples as stage
from megatron_grpo.algorithms.context import SamplingRun
from megatron_grpo.algorithms.sample_buffer import OrderedBuffer
from megatron_grpo.algorithms.samples import StepSamples, sample
from megatron_grpo.algorithms.step_advantages import score
from megatron_grpo.algorithms.validation import validate
from megatron_grpo.batch.generation_requests import EngineCounts
from megatron_grpo.batch.trajectory import Outcome, SampledGroup, Trajectory
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.loss_schema import RewardShapingConfig
from megatron_grpo.config.schema import Config, GRPOConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import SETTINGS, make_sampling_run
from tests.support.trajectories import failed_trajectory, make_trajectory, plain_groups

SAMPLES = 2


def answers(prompts: Sequence[DatumSpec], samples: int) -> list[list[Trajectory]]:
    """Rewards (0, 1) for prompt i when i is even: those groups have a signal."""
    return [
        [
            make_trajectory(
                prompt_idx=prompt["idx"],
                group=group,
                sample=number,
                reward=float(number) if prompt["idx"] % 2 == 0 else 1.0,
            )
            for number in range(samples)
        ]
        for group, prompt in enumerate(prompts)
    ]


def make(tmp_path: Path, **settings: Any) -> tuple[SamplingRun, FakeRollouts]:
    rollouts = FakeRollouts(answers)
    config = Config(grpo=GRPOConfig(num_prompts_per_step=3, num_generations_per_prompt=SAMPLES, **settings))
    return make_sampling_run(config, tmp_path, rollouts), rollouts


def batches(*rows: list[int]) -> Iterator[Any]:
    return iter([[{"idx": idx} for idx in row] for row in rows])


def draw_samples(run: SamplingRun, prompts: Iterator[Any]) -> StepSamples:
    samples = sample(run, prompts, StepTimer())
    assert samples is not None
    return samples


def prompts_of(outcomes: list[Outcome]) -> list[int]:
    assert [outcome.sample for outcome in outcomes] == list(range(SAMPLES)) * (len(outcomes) // SAMPLES)
    return [outcome.prompt_idx for outcome in outcomes[::SAMPLES]]


def trajectories_of(groups: list[SampledGroup]) -> list[list[dict[str, Any]]]:
    return plain_groups(FakeRollouts().fetch(groups))


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompts whose samples were scored, in turn."""
    prompts: list[int] = []

    def counted(config: Config, outcomes: list[Outcome]) -> Any:
        prompts.extend(outcome.prompt_idx for outcome in outcomes[::SAMPLES])
        return score(config, outcomes)

    monkeypatch.setattr(stage, "score", counted)
    return prompts


def test_without_dynamic_sampling_a_step_is_a_generation_batch(tmp_path: Path) -> None:
    (run, rollouts), prompts = make(tmp_path), batches([1, 2, 3], [4, 5, 6])
    for expected in ([1, 2, 3], [4, 5, 6]):
        samples = draw_samples(run, prompts)
        assert prompts_of(samples.outcomes) == expected
        assert samples.outcomes == samples.sampled
        assert samples.metrics == {}
        assert samples.scores.rewards.tolist() == score(run.config, samples.outcomes).rewards.tolist()
    assert sample(run, prompts, StepTimer()) is None
    assert [request["generation_batch"] for request in rollouts.asked] == [1, 2]
    assert run.state["consumed_samples"] == 6


def test_what_decides_the_draw(tmp_path: Path) -> None:
    run, rollouts = make(tmp_path, seed=17)
    run.state["generation_batches"] = 4
    draw_samples(run, batches([8, 3]))
    assert rollouts.asked == [
        {"rows": [8, 3], "samples_per_prompt": SAMPLES, "sampling": SETTINGS, "run_seed": 17, "generation_batch": 5}
    ]


def test_dynamic_sampling_fills_a_step_from_several_batches(tmp_path: Path) -> None:
    run, rollouts = make(tmp_path, use_dynamic_sampling=True)
    prompts = batches([0, 1, 2], [3, 5, 7], [4, 6, 8], [10, 12, 14])
    samples = draw_samples(run, prompts)
    assert prompts_of(samples.outcomes) == [0, 2, 4]
    assert [outcome.group for outcome in samples.outcomes] == [0, 0, 1, 1, 2, 2]
    assert prompts_of(samples.sampled) == [0, 1, 2, 3, 5, 7, 4, 6, 8]
    assert samples.metrics == {
        "dynamic_sampling_gen_batches": 3.0,
        "dynamic_sampling_groups_without_signal": 4.0,
        "dynamic_sampling_groups_sliced": 2.0,
    }
    assert run.batch_cache == []
    assert [[row["prompt_idx"] for row in group] for group in trajectories_of(samples.groups)] == [
        [0] * 2,
        [2] * 2,
        [4] * 2,
    ]
    samples = draw_samples(run, prompts)
    assert prompts_of(samples.outcomes) == [10, 12, 14]
    assert [request["generation_batch"] for request in rollouts.asked] == [1, 2, 3, 4], (
        "every generation batch has seeds of its own"
    )
    assert run.state["consumed_samples"] == 12
    assert rollouts.fetched == [], "no token comes to the driver"


def test_a_group_is_scored_once(tmp_path: Path, scored: list[int]) -> None:
    """The scores of a group go with the group into the step, also from an earlier generation batch."""
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=2, max_response_length=3)
    run, _ = make(tmp_path, use_dynamic_sampling=True, reward_shaping=shaping)
    samples = draw_samples(run, batches([0, 1, 2], [3, 5, 7], [4, 6, 8]))
    assert scored == [0, 1, 2, 3, 5, 7, 4, 6, 8]
    expected = score(run.config, samples.outcomes)
    assert samples.scores.rewards.tolist() == expected.rewards.tolist()
    assert samples.scores.has_signal.tolist() == samples.scores.differs.tolist() == [True] * 3
    assert samples.scores.reward_parts is samples.scores.function_weights is None


def test_without_dynamic_sampling_a_step_is_scored_once(tmp_path: Path, scored: list[int]) -> None:
    run, _ = make(tmp_path)
    draw_samples(run, batches([0, 1, 2]))
    assert scored == [0, 1, 2]


def test_what_waits_when_the_data_ends_is_there_after_a_restart(tmp_path: Path, scored: list[int]) -> None:
    run, rollouts = make(tmp_path, use_dynamic_sampling=True)
    waiting = run.batch_cache
    assert sample(run, batches([0, 1, 2]), StepTimer()) is None
    assert waiting is run.batch_cache, "whoever saves it holds the list"
    saved = json.dumps([[trajectory.to_row() for trajectory in group] for group in rollouts.fetch(run.batch_cache)])
    resumed, again = make(tmp_path, use_dynamic_sampling=True)
    resumed.state = json.loads(json.dumps(run.state))
    resumed.batch_cache[:] = again.put([[Trajectory.from_row(row) for row in group] for group in json.loads(saved)])
    scored.clear()
    continued = draw_samples(resumed, batches([4, 6, 8]))
    assert scored == [0, 2, 4, 6, 8], "what waited has to be scored again"
    straight = draw_samples(make(tmp_path, use_dynamic_sampling=True)[0], batches([0, 1, 2], [4, 6, 8]))
    assert continued.outcomes == straight.outcomes
    assert trajectories_of(continued.groups) == trajectories_of(straight.groups)
    assert continued.scores.rewards.tolist() == straight.scores.rewards.tolist()
    assert [request["generation_batch"] for request in again.asked] == [2]


def test_a_step_that_does_not_fill_up_ends_the_run(tmp_path: Path) -> None:
    run, _ = make(tmp_path, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2)
    with pytest.raises(SamplingError, match=r"found 1 of the 3 prompts of a step in .*max_gen_batches=2"):
        sample(run, batches([0, 1, 3], [5, 7, 9], [2, 4, 6]), StepTimer())


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_is_not_finite_is_found_before_anything_is_made_of_it(dynamic: bool, tmp_path: Path) -> None:
    run, rollouts = make(tmp_path, use_dynamic_sampling=dynamic)
    run.state["total_steps"] = 6
    fine = make_trajectory(prompt_idx=5)
    rollouts.answers = lambda *_: [[fine, make_trajectory(prompt_idx=5, reward=math.nan)]]
    with pytest.raises(SamplingError, match=r"step 7: the reward is not finite for 1 response\(s\) to prompt\(s\) 5"):
        sample(run, batches([5]), StepTimer())
    rollouts.answers = lambda *_: [[make_trajectory(prompt_idx=5, logprobs=[math.nan, 0.0]), fine]]
    with pytest.raises(RunError, match="step 7: a sampling log-probability is not finite") as caught:
        sample(run, batches([5]), StepTimer())
    assert not isinstance(caught.value, SamplingError)
    assert run.batch_cache == []


@pytest.mark.parametrize("dynamic", [True, False])
def test_samples_that_were_drawn_ahead(dynamic: bool, tmp_path: Path) -> None:
    """The same groups as in turn; counts are of what steps took, for a resume."""
    (run, rollouts), (plain, _) = (make(tmp_path, use_dynamic_sampling=dynamic) for _ in range(2))
    rows = [[0, 1, 2], [4, 5, 7], [6, 8, 10], [12, 14, 16]]
    pool: Any = rollouts
    loader: Any = SimpleNamespace(state_dict=dict)
    options = AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=1)
    loop = replace(run.config.loop, num_generations_per_prompt=SAMPLES, max_num_steps=9, async_grpo=options)
    run.buffer = OrderedBuffer(pool, loader, loop, SETTINGS, 0)
    prompts, in_turn = batches(*rows), batches(*rows)
    expected, ahead = draw_samples(plain, in_turn), draw_samples(run, prompts)
    assert ahead.outcomes == expected.outcomes
    assert run.state == plain.state
    assert len(rollouts.asked) == run.state["generation_batches"] + 1
    assert ahead.metrics.items() >= expected.metrics.items()
    assert ahead.metrics["trajectory_age_max"] == 0
    assert ahead.metrics["buffer_depth"] == 3
    assert ahead.metrics["exposed_generation_s"] >= 0
    run.state["total_steps"] = plain.state["total_steps"] = 1
    expected, ahead = draw_samples(plain, in_turn), draw_samples(run, prompts)
    assert ahead.outcomes == expected.outcomes
    assert ahead.metrics["trajectory_age_max"] == 1


def test_a_step_has_the_engines_counts_from_before_a_validation_and_none_of_it(tmp_path: Path) -> None:
    """Responses of an asynchronous run are under way before the validation, and complete after it."""
    run, rollouts = make(tmp_path)
    run.val_prompts = [{"idx": 1, "task_name": "task"}]  # type: ignore[typeddict-item]
    run.logger = SimpleNamespace(show_samples=lambda *_: None)  # type: ignore[assignment]
    counts = EngineCounts()

    def take() -> dict[int, EngineCounts]:
        nonlocal counts
        counted, counts = counts, EngineCounts()
        return {0: counted}

    def count_validation(prompts: Sequence[DatumSpec], samples: int) -> list[list[Trajectory]]:
        nonlocal counts
        counts += EngineCounts(running=256, waiting=9, prefix_tokens=999, tokens=5000, busy_s=10.0)
        return answers(prompts, samples)

    rollouts.take_engine_counts = take  # type: ignore[method-assign]
    draw_samples(run, batches([1, 2, 3]))
    for validations in (1, 2, 0):
        counts += EngineCounts(running=8, kv_cache_usage=0.5, prefix_tokens=60, prefix_hits=30, tokens=100, busy_s=2.0)
        rollouts.answers = count_validation
        for _ in range(validations):
            assert validate(run)
        rollouts.answers = answers
        counts += EngineCounts(running=6, kv_cache_usage=0.25, prefix_tokens=20, tokens=500, busy_s=1.0)
        assert draw_samples(run, batches([4, 5, 6])).engines == {
            "engine_running": 8.0,
            "engine_waiting": 0.0,
            "engine_kv_cache_usage": 0.5,
            "engine_tokens_per_s": 200.0,
            "engine_prefix_hit_rate": 0.375,
        }


def test_a_rollout_that_failed_makes_no_difference(tmp_path: Path) -> None:
    """A group with one other sample is dropped, one with two others is not."""
    run, rollouts = make(tmp_path, use_dynamic_sampling=True)
    run.config.grpo.num_generations_per_prompt = 3
    run.config.grpo.num_prompts_per_step = 1
    failed = failed_trajectory(prompt_idx=0)
    rollouts.answers = lambda *_: [
        [make_trajectory(reward=1.0), failed, failed],
        [failed, make_trajectory(prompt_idx=1, reward=0.0), make_trajectory(prompt_idx=1, reward=1.0)],
    ]
    samples = draw_samples(run, batches([0, 1]))
    assert [outcome.prompt_idx for outcome in samples.outcomes] == [0, 1, 1]
    assert [outcome.failure for outcome in samples.outcomes] == ["it raised twice", None, None]
    assert samples.metrics["dynamic_sampling_groups_without_signal"] == 1
