"""Rollout workers with real environments and a made-up engine: what comes out, and what comes of failures."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import CompletePrompt, RolloutPool
from megatron_grpo.rollouts.rollout import compute_sample_seed
from tests.support.made_up_pool import (
    PROMPTS,
    SAMPLES,
    SEED,
    SETTINGS,
    STEP,
    collect,
    expected_trajectory,
    pool,
    prompt,
    row_anywhere,
    seed_text,
)
from tests.support.rare import rare
from tests.support.recording import make_record


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cluster = RayCluster(ClusterConfig())
    cluster.start()
    yield
    cluster.shutdown()


@pytest.fixture(scope="module")
def quiet(cluster: None) -> Iterator[RolloutPool]:
    """One for tests that leave it as it was: two engines and a worker."""
    with pool() as rollouts:
        yield rollouts


@pytest.mark.parametrize(
    ("engines", "workers"),
    [(3, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(1, 1), (2, 1), (1, 2)])],
)
def test_groups_come_in_the_order_of_the_prompts_whatever_the_layout(engines: int, workers: int) -> None:
    prompts = [prompt(idx) for idx in (5, 3, 8, 0, 12, 7)]
    timer = StepTimer()
    with pool(engines=[{}] * engines, num_workers=workers) as rollouts:
        groups = collect(rollouts, prompts, timer)
        trajectories = rollouts.fetch(groups)
    expected = [
        [expected_trajectory(datum, group, sample) for sample in range(SAMPLES)] for group, datum in enumerate(prompts)
    ]
    assert {one.engine for group in trajectories for one in group} == set(range(engines))
    assert [[row_anywhere(one) for one in group] for group in trajectories] == [
        [row_anywhere(one) for one in group] for group in expected
    ]
    assert [group.outcomes for group in groups] == [[one.outcome for one in group] for group in expected]
    assert {"generation", "environment"} <= timer.seconds.keys()


def test_requests_leave_in_one_call_per_engine_with_groups_whole_and_in_order(quiet: RolloutPool) -> None:
    before = _calls(quiet)
    collect(quiet, [prompt(idx) for idx in range(PROMPTS)])
    calls = [after[len(earlier) :] for after, earlier in zip(_calls(quiet), before, strict=True)]
    seeds = [[compute_sample_seed(SEED, STEP, idx, sample) for sample in range(SAMPLES)] for idx in range(PROMPTS)]
    assert calls == [[[*chain(*seeds[:3])]], [[*chain(*seeds[3:])]]]


def _calls(rollouts: RolloutPool) -> list[list[list[int]]]:
    """The seeds of each call that each engine has got."""
    return [calls for calls, _ in ray.get([engine.history.remote() for engine in rollouts.engines])]


def test_fewer_prompts_than_workers() -> None:
    with pool(engines=[{}, {}, {}], num_workers=3) as rollouts:
        groups = collect(rollouts, [prompt(4)])
        assert [[one.prompt_idx for one in group.outcomes] for group in groups] == [[4] * SAMPLES]


def arrivals(rollouts: RolloutPool, prompts: Sequence[DatumSpec]) -> list[CompletePrompt]:
    """Prompts numbered from 10, in the order in which they are complete."""
    settings = rollouts.make_settings(SAMPLES, SETTINGS, SEED, STEP)
    begun = rollouts.begin({10 + number: one for number, one in enumerate(prompts)}, settings)
    came: list[CompletePrompt] = []
    since = time.monotonic()
    while begun.streams:
        rollouts.wait_for_groups([begun], since)
        came += rollouts.list_complete([begun])
    assert begun.is_done()
    return came


@pytest.mark.parametrize(("engines", "workers"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_groups_are_told_of_when_they_are_complete_and_taken_later(engines: int, workers: int) -> None:
    slow = compute_sample_seed(SEED, STEP, 2, 1)
    with pool(engines=[{"stuck": [slow]}] * engines, num_workers=workers, timeout_s=5.0) as rollouts:
        came = arrivals(rollouts, [prompt(idx) for idx in range(PROMPTS)])
        first, second = rollouts.take(came[3:]), rollouts.take(came[:3])
        gc.collect()
        time.sleep(1.0)  # for what nobody refers to to go
        trajectories = rollouts.fetch([*second, *first])
    numbers = [one.number for one in came]
    assert sorted(numbers) == list(range(10, 10 + PROMPTS))
    assert numbers[-1] == 12, "the one whose engine was stuck at the first attempt"
    for number, group, found in zip(numbers, [*second, *first], trajectories, strict=True):
        expected = [expected_trajectory(prompt(number - 10), number, sample) for sample in range(SAMPLES)]
        assert group.outcomes == [one.outcome for one in expected]
        assert [row_anywhere(one) for one in found] == [row_anywhere(one) for one in expected]


def test_an_engine_that_dies_ends_the_stream_with_one_clear_error() -> None:
    with (
        pool(engines=[{}, {"dies_after": 1}]) as rollouts,
        pytest.raises(SamplingError, match=r"^generation: generation engine 1 died \(its process is gone\)$"),
    ):
        arrivals(rollouts, [prompt(idx) for idx in range(PROMPTS)])


def shift(lengths: NDArray[np.int64], arrays: dict[str, NDArray[Any]], by: int) -> tuple[dict[str, NDArray[Any]], int]:
    """Something that needs the step's order: each token plus the number of its sequence, times `by`."""
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return {"shifted": (arrays["token_ids"] + numbers * by).astype(np.int32)}, int(arrays["sampled"].sum())


@pytest.mark.parametrize("workers", [*rare([1]), 2])
def test_shards_and_what_is_computed_from_them(workers: int) -> None:
    prompts = [prompt(idx) for idx in range(PROMPTS)]
    order = np.random.default_rng(0).permutation(PROMPTS * SAMPLES)
    sequences = [np.sort(order[begin::3]) for begin in range(3)]
    with pool(engines=[{}, {}], num_workers=workers) as rollouts:
        groups = collect(rollouts, prompts)
        flat = [one for group in rollouts.fetch(groups) for one in group]
        batch = step_batch(flat, sequences)
        batch.fields = rollouts.build_partitions(groups, sequences)
        fetched = [{name: ray.get(parts[shard]) for name, parts in batch.fields.items()} for shard in range(3)]
        summary = rollouts.compute(shift, batch, ["token_ids", "sampled"], 1000)
        shifted = ray.get(batch.fields["shifted"])
    assert [{name: array.dtype.name for name, array in shard.items()} for shard in fetched] == [
        {"token_ids": "int32", "sampled": "bool", "generation_logprobs": "float32"}
    ] * 3
    for numbers, shard, moved in zip(sequences, fetched, shifted, strict=True):
        mine = [flat[number] for number in numbers]
        np.testing.assert_array_equal(shard["token_ids"], np.concatenate([one.token_ids for one in mine]))
        given = [len(one.token_ids) - len(one.logprobs) for one in mine]
        masks = [np.arange(len(one.token_ids)) >= count for one, count in zip(mine, given, strict=True)]
        np.testing.assert_array_equal(shard["sampled"], np.concatenate(masks))
        padded = [np.concatenate([np.zeros(n, np.float32), one.logprobs]) for one, n in zip(mine, given, strict=True)]
        np.testing.assert_array_equal(shard["generation_logprobs"], np.concatenate(padded))
        ids = [one.token_ids + 1000 * number for one, number in zip(mine, numbers, strict=True)]
        np.testing.assert_array_equal(moved, np.concatenate(ids))
    assert summary == sum(len(one.logprobs) for one in flat)


def test_groups_that_were_put_are_as_good_as_collected_ones(quiet: RolloutPool) -> None:
    groups = collect(quiet, [prompt(idx) for idx in range(2)])
    again = quiet.put(quiet.fetch(groups))
    assert [group.outcomes for group in again] == [group.outcomes for group in groups]
    numbers = [np.arange(2 * SAMPLES)]
    one, other = (ray.get(quiet.build_partitions(of, numbers)["token_ids"]) for of in (groups, again))
    np.testing.assert_array_equal(one, other)


EVEN, ODD = np.arange(0, 2 * SAMPLES, 2), np.arange(1, 2 * SAMPLES, 2)


def step_batch(flat: list[Trajectory], sequences: list[NDArray[np.int64]]) -> StepBatch:
    """The batch of a step that trains on these, in a shard for each of `sequences`, without any entries."""
    return StepBatch(
        lengths=np.array([len(one.token_ids) for one in flat]),
        response_tokens=np.array([len(one.logprobs) for one in flat]),
        in_loss=np.ones(len(flat), dtype=np.bool_),
        partitions=sequences,
    )


def test_the_dump_holds_what_was_collected(quiet: RolloutPool, tmp_path: Path) -> None:
    groups = collect(quiet, [prompt(idx) for idx in range(PROMPTS)])
    groups = [groups[3], groups[1]]  # as dynamic sampling puts groups together
    flat = [one for group in quiet.fetch(groups) for one in group]
    by_response, by_token = (step_batch(flat, numbers) for numbers in ([EVEN, ODD], [EVEN, ODD]))
    record = make_record(samples_per_prompt=SAMPLES)
    by_response.advantages = np.arange(2 * SAMPLES, dtype=np.float32)
    by_token.fields = {"advantages": [], "prev_logprobs": []}
    for numbers in by_token.partitions:
        lengths = by_token.lengths[numbers]
        of_token = [1000 * number + np.arange(n) for number, n in zip(numbers, lengths, strict=True)]
        by_token.fields["advantages"].append(ray.put(np.concatenate(of_token).astype(np.float32)))
        by_token.fields["prev_logprobs"].append(ray.put(-np.concatenate(of_token).astype(np.float32)))
    quiet.wait_dump(quiet.dump(4, groups, by_response, tmp_path, record))
    quiet.wait_dump(quiet.dump(5, groups, by_token, tmp_path, record, max_rollouts=3))
    rows = list(read_rollouts(tmp_path, 4))
    assert [row["group"] for row in rows] == [0] * SAMPLES + [1] * SAMPLES
    for row, one in zip(rows, flat, strict=True):
        np.testing.assert_array_equal(row["token_ids"], one.token_ids)
        np.testing.assert_array_equal(row["logprobs"], one.logprobs)
        assert (row["reward"], row["response"], row["prompt_idx"]) == (one.reward, one.response, one.prompt_idx)
        assert set(row["advantages"].tolist()) == {row["group"] * SAMPLES + row["sample"]}
        assert (len(row["advantages"]), row["prev_logprobs"]) == (len(one.logprobs), None)
    chosen = list(read_rollouts(tmp_path, 5))
    assert [(row["group"], row["sample"]) for row in chosen] == [(0, 0), (0, 2), (1, 1)]
    for row in chosen:
        places = [place for start, end, _ in row["spans"] for place in range(start, end)]
        number = 1000 * (row["group"] * SAMPLES + row["sample"])
        assert row["advantages"].tolist() == [number + place for place in places]
        assert row["prev_logprobs"].tolist() == [-number - place for place in places]


def failing(function: str, **changes: Any) -> EnvironmentConfig:
    path = f"tests.integration.bad_rewards.{function}"
    return EnvironmentConfig(type="reward_functions", reward_funcs=[path], **changes)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            "raises_on_bad",
            r"environment task: tests.integration.bad_rewards.raises_on_bad raised ValueError: cannot judge this "
            r"\(bad_rewards.py:\d+\)",
        ),
        ("sleeps_on_bad", r"environment task: no answer within env.task.timeout_s=2 s"),
        ("dies_on_bad", "environment task: its process ended over this response"),
    ],
)
@pytest.mark.parametrize("processes", [1, *rare([2])])
def test_only_the_responses_that_break_a_reward_function_are_at_fault(
    function: str, reason: str, processes: int
) -> None:
    bad = {1: [seed_text(1, 2)], 4: [seed_text(4, 0)]}
    prompts = [prompt(idx, bad.get(idx, ())) for idx in range(PROMPTS)]
    with pool(failing(function, timeout_s=2.0, num_workers=processes), max_failed_fraction=0.0) as rollouts:
        outcomes = [one for group in collect(rollouts, prompts) for one in group.outcomes]
        faulty = [outcome for outcome in outcomes if outcome.fault is not None]
        assert [(outcome.prompt_idx, outcome.sample) for outcome in faulty] == [(1, 2), (4, 0)]
        for outcome in faulty:
            assert re.fullmatch(reason, str(outcome.fault))
            assert (outcome.failure, outcome.reward, outcome.correct, outcome.reward_parts) == (None, 0.0, None, {})
            assert outcome.response_tokens > 0, "it is learnt from"
        whole = [outcome for outcome in outcomes if outcome.fault is None]
        assert all(one.reward == float(seed_text(one.prompt_idx, one.sample)) for one in whole)
        (after,) = collect(rollouts, [prompt(0)])
        assert [one.failure for one in after.outcomes] == [None] * SAMPLES, "it works on afterwards"


def test_too_many_failures_end_the_collect_with_the_reason() -> None:
    prompts = [prompt(idx, [seed_text(idx, sample) for sample in range(SAMPLES)]) for idx in (31, 32)]
    reason = (
        "8 of 8 rollouts failed, more than rollouts.max_failed_fraction=0.25 allows: 8 x environment task: "
        "tests.integration.bad_rewards.raises_on_bad raised ValueError: cannot judge this .*, row 31"
    )
    with pool(failing("raises_on_bad"), max_failed_fraction=0.25) as rollouts:
        with pytest.raises(SamplingError, match=reason):
            collect(rollouts, prompts)
        assert len(collect(rollouts, [prompt(1)])) == 1


def test_a_request_that_the_engine_gives_up_is_asked_again_with_its_seed() -> None:
    once, twice = compute_sample_seed(SEED, STEP, 0, 1), compute_sample_seed(SEED, STEP, 1, 2)
    with pool(engines=[{"refused": [once, twice, twice]}]) as rollouts:
        groups = collect(rollouts, [prompt(idx) for idx in range(3)])
        trajectories = rollouts.fetch(groups)
    failures = {(one.prompt_idx, one.sample): one.failure for group in groups for one in group.outcomes if one.failure}
    assert failures == {(1, 2): "refused by the engine"}
    assert row_anywhere(trajectories[0][1]) == row_anywhere(expected_trajectory(prompt(0), 0, 1))
    failed = trajectories[1][2]
    assert (failed.token_ids.tolist(), failed.spans, failed.logprobs.tolist()) == ([101, 0], [], [])


def test_a_request_that_is_never_answered_is_aborted_and_asked_again() -> None:
    once, twice = compute_sample_seed(SEED, STEP, 0, 1), compute_sample_seed(SEED, STEP, 1, 2)
    with pool(engines=[{"stuck": [once, twice, twice]}], timeout_s=1.0) as rollouts:
        groups = collect(rollouts, [prompt(idx) for idx in range(3)])
        failures = [(one.prompt_idx, one.sample, one.failure) for group in groups for one in group.outcomes]
        _, aborted = ray.get(rollouts.engines[0].history.remote())
    reason = "generation engine 0 did not finish it within rollouts.timeout_s=1 s"
    assert [one for one in failures if one[2]] == [(1, 2, reason)]
    assert len(aborted) == 3


def test_an_engine_that_dies_is_one_clear_error() -> None:
    with pool(engines=[{}, {"dies_after": 1}]) as rollouts:
        began = time.monotonic()
        with pytest.raises(SamplingError, match=r"^generation: generation engine 1 died \(its process is gone\)$"):
            collect(rollouts, [prompt(idx) for idx in range(PROMPTS)])
        assert time.monotonic() - began < 20


def test_an_engine_that_does_not_answer_is_named() -> None:
    seeds = [compute_sample_seed(SEED, STEP, idx, 0) for idx in range(PROMPTS)]
    with (
        pool(engines=[{}, {"stuck": seeds}], generation_timeout_s=1.0) as rollouts,
        pytest.raises(SamplingError, match=r"^generation: no answer from generation engine 1 within 1 s$"),
    ):
        collect(rollouts, [prompt(idx) for idx in range(PROMPTS)])


@pytest.mark.parametrize("workers", [*rare([1]), 2])
def test_what_a_dead_engine_was_sampling_is_sampled_again_by_the_next(workers: int) -> None:
    """The second engine dies over its second answer, and so does the one in its place."""
    prompts = [prompt(idx) for idx in range(PROMPTS)]
    with pool(
        engines=[{}, {"dies_after": 1}], spare=[{"dies_after": 1, "chunk": 2}, {}], num_workers=workers
    ) as rollouts:
        groups = collect(rollouts, prompts)
        trajectories = rollouts.fetch(groups)
        seeds = [compute_sample_seed(SEED, STEP, idx, sample) for idx in range(3, PROMPTS) for sample in range(SAMPLES)]
        histories = ray.get([engine.history.remote() for engine in rollouts.engines])
        again = collect(rollouts, prompts)
    expected = [
        [row_anywhere(expected_trajectory(datum, group, sample)) for sample in range(SAMPLES)]
        for group, datum in enumerate(prompts)
    ]
    assert [[row_anywhere(one) for one in group] for group in trajectories] == expected
    assert len(histories[0][0]) == 1, "the engine that works is not asked again"
    ((left,),) = [calls for calls, _ in histories][1:]
    assert set(left) <= set(seeds), "nothing is asked for but what the engines before it owed"
    assert [group.outcomes for group in again] == [group.outcomes for group in groups]


@pytest.mark.slow  # test_what_a_dead_engine_was_sampling… replaces engines with every `make test`
def test_a_late_engine_is_replaced_until_none_is_left() -> None:
    seeds = [compute_sample_seed(SEED, STEP, idx, 0) for idx in range(PROMPTS)]
    stuck = {"stuck": seeds}
    with pool(engines=[{}, stuck], spare=[{}], generation_timeout_s=5.0) as rollouts:
        outcomes = [
            one for group in collect(rollouts, [prompt(idx) for idx in range(PROMPTS)]) for one in group.outcomes
        ]
    assert [one.failure for one in outcomes] == [None] * PROMPTS * SAMPLES
    with (
        pool(engines=[{}, stuck], spare=[stuck], generation_timeout_s=5.0) as rollouts,
        pytest.raises(SamplingError, match=r"^generation: no answer from generation engine 1 within 5 s$"),
    ):
        collect(rollouts, [prompt(idx) for idx in range(PROMPTS)])


def test_a_stopped_environment_process_is_replaced() -> None:
    with pool(failing("raises_on_bad", timeout_s=2.0)) as rollouts:
        (actor, *_) = rollouts.environments["task"]._actors
        pid = ray.get(actor.start.remote()).pid
        os.kill(pid, signal.SIGSTOP)
        groups = collect(rollouts, [prompt(idx) for idx in range(2)])
        assert not [one.failure for group in groups for one in group.outcomes if one.failure]
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{pid}/stat").exists()


def test_an_environment_that_does_not_come_up_is_named() -> None:
    environment = EnvironmentConfig(type="reward_functions", reward_funcs=["tests.no_such_module.f"])
    with (
        pytest.raises(
            SamplingError, match=r"environment task: a process failed with RunError: .*no_such_module.* as it started"
        ),
        pool(environment),
    ):
        pass
