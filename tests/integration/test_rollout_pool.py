"""Rollout workers with real environments and a made-up engine: what comes out, and what comes of failures."""

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
from megatron_grpo.batch.trajectory import SampledGroup, Trajectory
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import CompletePrompt, RolloutPool
from megatron_grpo.rollouts.rollout import compute_sample_seed
from tests.support.made_up_engine import MadeUpEngine
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
from tests.support.recorded_run import make_record
from tests.support.token_functions import shift


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cluster = RayCluster(ClusterConfig())
    cluster.start()
    yield
    cluster.shutdown()


@pytest.fixture(scope="module")
def quiet(cluster: None) -> Iterator[RolloutPool]:
    """A pool for tests that leave it as it was: three engines and two workers."""
    with pool(engines=[{}] * 3, num_workers=2) as rollouts:
        yield rollouts


@pytest.fixture(scope="module")
def failing(cluster: None) -> Iterator[RolloutPool]:
    """A pool whose engines fail over requests that tests name."""
    with pool(num_workers=2, timeout_s=3.0) as rollouts:
        yield rollouts


BREAKING = ("raises_on_bad", "sleeps_on_bad", "dies_on_bad")
"""Functions of bad_rewards.py, and the tasks that have them."""


@pytest.fixture(scope="module", params=[1, *rare([2])])
def breaking(cluster: None, request: pytest.FixtureRequest) -> Iterator[RolloutPool]:
    """A pool whose reward functions break over responses that tests name, in so many processes each."""
    tasks = {
        function: EnvironmentConfig(
            type="reward_functions",
            reward_funcs=[f"tests.integration.bad_rewards.{function}"],
            timeout_s=2.0,
            num_workers=request.param,
        )
        for function in BREAKING
    }
    with pool(tasks, max_failed_fraction=0.0) as rollouts:
        yield rollouts


def test_groups_come_in_the_order_of_the_prompts(quiet: RolloutPool) -> None:
    check_groups(quiet)


@pytest.mark.slow
@pytest.mark.parametrize(("engines", "workers"), [(1, 1), (2, 1), (1, 2)])
def test_groups_come_in_the_order_of_the_prompts_whatever_the_layout(engines: int, workers: int) -> None:
    with pool(engines=[{}] * engines, num_workers=workers) as rollouts:
        check_groups(rollouts)


def check_groups(rollouts: RolloutPool) -> None:
    prompts = [prompt(idx) for idx in (5, 3, 8, 0, 12, 7)]
    timer = StepTimer()
    groups = collect(rollouts, prompts, timer)
    trajectories = rollouts.fetch(groups)
    expected = [
        [expected_trajectory(datum, group, sample) for sample in range(SAMPLES)] for group, datum in enumerate(prompts)
    ]
    assert {one.engine for group in trajectories for one in group} == set(range(len(rollouts.engines)))
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
    assert calls == [[[*chain(*seeds[begin : begin + 2])]] for begin in (0, 2, 4)]


def _calls(rollouts: RolloutPool) -> list[list[list[int]]]:
    """The seeds of each call that each engine has got."""
    return [calls for calls, _ in ray.get([engine.history.remote() for engine in rollouts.engines.values()])]


def test_fewer_prompts_than_workers(quiet: RolloutPool) -> None:
    groups = collect(quiet, [prompt(4)])
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


def break_over(rollouts: RolloutPool, **seeds: list[int]) -> None:
    """Let each engine fail over requests with these seeds."""
    ray.get([engine.break_over.remote(**seeds) for engine in rollouts.engines.values()])


def test_groups_are_told_of_when_they_are_complete_and_taken_later(failing: RolloutPool) -> None:
    break_over(failing, stuck=[compute_sample_seed(SEED, STEP, 2, 1)])
    came = arrivals(failing, [prompt(idx) for idx in range(PROMPTS)])
    first, second = failing.take(came[3:]), failing.take(came[:3])
    gc.collect()
    time.sleep(1.0)  # for what nobody refers to to go
    trajectories = failing.fetch([*second, *first])
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


def test_shards_and_what_is_computed_from_them(quiet: RolloutPool) -> None:
    prompts = [prompt(idx) for idx in range(PROMPTS)]
    order = np.random.default_rng(0).permutation(PROMPTS * SAMPLES)
    sequences = [np.sort(order[begin::3]) for begin in range(3)]
    groups = collect(quiet, prompts)
    flat = [one for group in quiet.fetch(groups) for one in group]
    batch = step_batch(flat, sequences)
    batch.fields = quiet.build_partitions(groups, sequences)
    fetched = [{name: ray.get(parts[shard]) for name, parts in batch.fields.items()} for shard in range(3)]
    summary = quiet.compute(shift, batch, ["token_ids", "sampled"], 1000)
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
    record = make_record(samples_per_prompt=SAMPLES, vocab=1000)
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


@pytest.mark.parametrize(
    ("function", "reason"),
    zip(
        BREAKING,
        [
            r"environment raises_on_bad: tests.integration.bad_rewards.raises_on_bad raised ValueError: cannot judge "
            r"this \(bad_rewards.py:\d+\)",
            r"environment sleeps_on_bad: no answer within env.sleeps_on_bad.timeout_s=2 s",
            "environment dies_on_bad: its process ended over this response",
        ],
        strict=True,
    ),
)
def test_only_the_responses_that_break_a_reward_function_are_at_fault(
    breaking: RolloutPool, function: str, reason: str
) -> None:
    bad = {1: [seed_text(1, 2)], 4: [seed_text(4, 0)]}
    prompts = [prompt(idx, bad.get(idx, ()), function) for idx in range(PROMPTS)]
    outcomes = [one for group in collect(breaking, prompts) for one in group.outcomes]
    faulty = [outcome for outcome in outcomes if outcome.fault is not None]
    assert [(outcome.prompt_idx, outcome.sample) for outcome in faulty] == [(1, 2), (4, 0)]
    for outcome in faulty:
        assert re.fullmatch(reason, str(outcome.fault))
        assert (outcome.failure, outcome.reward, outcome.correct, outcome.reward_parts) == (None, 0.0, None, {})
        assert outcome.response_tokens > 0, "it is learnt from"
    whole = [outcome for outcome in outcomes if outcome.fault is None]
    assert all(one.reward == float(seed_text(one.prompt_idx, one.sample)) for one in whole)
    (after,) = collect(breaking, [prompt(0, task=function)])
    assert [one.failure for one in after.outcomes] == [None] * SAMPLES, "it works on afterwards"


def test_too_many_failures_end_the_collect_with_the_reason(breaking: RolloutPool) -> None:
    bad = {idx: [seed_text(idx, sample) for sample in range(SAMPLES)] for idx in (31, 32)}
    reason = (
        "8 of 8 rollouts failed, more than rollouts.max_failed_fraction=0 allows: 8 x environment raises_on_bad: "
        "tests.integration.bad_rewards.raises_on_bad raised ValueError: cannot judge this .*, row 31"
    )
    with pytest.raises(SamplingError, match=reason):
        collect(breaking, [prompt(idx, texts, "raises_on_bad") for idx, texts in bad.items()])
    assert len(collect(breaking, [prompt(1, task="raises_on_bad")])) == 1


def test_a_request_that_the_engine_gives_up_is_asked_again_with_its_seed(failing: RolloutPool) -> None:
    once, twice = compute_sample_seed(SEED, STEP, 0, 1), compute_sample_seed(SEED, STEP, 1, 2)
    break_over(failing, refused=[once, twice, twice])
    groups = collect(failing, [prompt(idx) for idx in range(3)])
    trajectories = failing.fetch(groups)
    failures = {(one.prompt_idx, one.sample): one.failure for group in groups for one in group.outcomes if one.failure}
    assert failures == {(1, 2): "refused by the engine"}
    assert row_anywhere(trajectories[0][1]) == row_anywhere(expected_trajectory(prompt(0), 0, 1))
    failed = trajectories[1][2]
    assert (failed.token_ids.tolist(), failed.spans, failed.logprobs.tolist()) == ([101, 0], [], [])


def test_a_request_that_is_never_answered_is_aborted_and_asked_again(failing: RolloutPool) -> None:
    once, twice = compute_sample_seed(SEED, STEP, 0, 1), compute_sample_seed(SEED, STEP, 1, 2)
    before = count_aborted(failing)
    break_over(failing, stuck=[once, twice, twice])
    groups = collect(failing, [prompt(idx) for idx in range(3)])
    failures = [(one.prompt_idx, one.sample, one.failure) for group in groups for one in group.outcomes if one.failure]
    [(prompt_idx, sample, failure)] = failures
    assert (prompt_idx, sample) == (1, 2)
    assert re.fullmatch(r"generation engine \d did not finish it within rollouts.timeout_s=3 s", failure)
    assert count_aborted(failing) - before == 3


def count_aborted(rollouts: RolloutPool) -> int:
    return sum(
        len(aborted) for _, aborted in ray.get([engine.history.remote() for engine in rollouts.engines.values()])
    )


def test_an_engine_that_dies_is_one_clear_error() -> None:
    with pool(engines=[{}, {"dies_after": 1}]) as rollouts:
        began = time.monotonic()
        with pytest.raises(SamplingError, match=r"^generation: generation engine 1 died \(its process is gone\)$"):
            collect(rollouts, [prompt(idx) for idx in range(PROMPTS)])
        assert time.monotonic() - began < 20


def test_an_engine_that_does_not_answer_is_named() -> None:
    seeds = [compute_sample_seed(SEED, STEP, idx, 0) for idx in range(PROMPTS)]
    with pool(engines=[{}, {"stuck": seeds}], generation_timeout_s=2.0) as rollouts:
        ray.get([engine.history.remote() for engine in rollouts.engines.values()])  # their processes have started
        with pytest.raises(SamplingError, match=r"^generation: no answer from generation engine 1 within 2 s$"):
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
        histories = ray.get([engine.history.remote() for engine in rollouts.engines.values()])
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


def expect_all(rollouts: RolloutPool, groups: Sequence[SampledGroup]) -> list[int]:
    """Require every response to the first prompts; return the engines that gave them."""
    trajectories = rollouts.fetch(groups)
    expected = [
        [row_anywhere(expected_trajectory(prompt(idx), idx, sample)) for sample in range(SAMPLES)]
        for idx in range(PROMPTS)
    ]
    assert [[row_anywhere(one) for one in group] for group in trajectories] == expected
    return sorted({one.engine for group in trajectories for one in group})


@pytest.mark.parametrize("workers", [1, *rare([2])])
def test_engines_come_and_go_between_batches(workers: int) -> None:
    prompts = [prompt(idx) for idx in range(PROMPTS)]
    with pool(engines=[{}], num_workers=workers) as rollouts:
        assert expect_all(rollouts, collect(rollouts, prompts)) == [0]
        engines: Any = rollouts.engines
        engines[1] = ray.remote(num_cpus=0)(MadeUpEngine).remote()
        rollouts.share_engines()
        assert expect_all(rollouts, collect(rollouts, prompts)) == [0, 1]
        rollouts.leaving.add(0)
        rollouts.share_engines()
        assert expect_all(rollouts, collect(rollouts, prompts)) == [1]
        assert rollouts.forget_idle_engines() == {}
        assert rollouts.leaving == set()
        del engines[0]
        assert expect_all(rollouts, collect(rollouts, prompts)) == [1]
        assert list(rollouts.take_engine_counts()) == [1]


@pytest.mark.parametrize("end", ["hand back", "die"])
def test_others_begin_again_what_a_leaving_engine_has_not_finished(end: str) -> None:
    stuck = [compute_sample_seed(SEED, STEP, 0, sample) for sample in (1, 2)]
    with pool(engines=[{"stuck": stuck}, {}]) as rollouts:
        settings = rollouts.make_settings(SAMPLES, SETTINGS, SEED, STEP)
        begun = rollouts.begin({idx: prompt(idx) for idx in range(PROMPTS)}, settings)
        complete: list[CompletePrompt] = []
        while len(complete) < PROMPTS - 1:
            rollouts.wait_for_groups([begun], time.monotonic())
            complete += rollouts.list_complete([begun])
        rollouts.leaving.add(0)
        rollouts.share_engines()
        assert rollouts.forget_idle_engines() == {0: 2}
        if end == "die":
            ray.kill(rollouts.engines[0])
        else:
            rollouts.hand_back(0)
        while begun.streams:
            rollouts.wait_for_groups([begun], time.monotonic())
            complete += rollouts.list_complete([begun])
        assert expect_all(rollouts, rollouts.take(sorted(complete))) == [0, 1]
        assert rollouts.forget_idle_engines() == {}


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


def test_a_stopped_environment_process_is_replaced(breaking: RolloutPool) -> None:
    (actor, *_) = breaking.environments["raises_on_bad"]._actors
    pid = ray.get(actor.start.remote()).pid
    os.kill(pid, signal.SIGSTOP)
    groups = collect(breaking, [prompt(idx, task="raises_on_bad") for idx in range(2)])
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
        pool({"task": environment}),
    ):
        pass
