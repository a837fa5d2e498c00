"""Samples of a prompt that are copies: told from answers that a policy is sure of, by the probabilities of both."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_grpo.algorithms.step_report import StepReport, log_step
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.rollouts.repeated_samples import REPEATED, bound_probability, find_copies, record_repeated_samples
from megatron_grpo.rollouts.rollout_metrics import compute_reward_function_metrics
from tests.support.grpo_run import Run
from tests.support.trajectories import failed_trajectory, make_outcome, make_trajectory
from tests.unit.rollouts.test_rollout import BATCH_SETTINGS, FakeEngine, FakeEnvironment, run


def draw(seed: int, tokens: int, sure: float) -> Trajectory:
    """A response from a policy that takes its likeliest of 50 tokens with probability `sure`."""
    generator = random.Random(seed)
    rest = (1 - sure) / 49
    ids = [0 if generator.random() < sure else generator.randrange(1, 50) for _ in range(tokens)]
    logprobs = [math.log(sure if token == 0 else rest) for token in ids]
    return make_trajectory(tokens, token_ids=[7, *ids], logprobs=logprobs, sample=seed)


def list_flagged(group: list[Trajectory], temperature: float = 1.0) -> list[int]:
    record_repeated_samples(group, temperature)
    copies = [id(copy) for copy in find_copies(group)]
    return [number for number, copy in enumerate(group) if id(copy) in copies]


def test_one_seed_for_all_samples_is_noticed() -> None:
    assert list_flagged([draw(5, 30, 0.5) for _ in range(8)]) == list(range(8))
    assert list_flagged([draw(5, 30, 0.5) for _ in range(8)], temperature=0.0) == [], "greedy sampling repeats itself"
    assert list_flagged([draw(seed, 30, 0.5) for seed in range(8)]) == []


def test_samples_that_come_in_pairs_are_noticed() -> None:
    """Two engines with the same seeds, or four seeds for eight samples."""
    assert list_flagged([draw(number % 4, 40, 0.5) for number in range(8)]) == list(range(8))
    assert list_flagged([*(draw(number, 40, 0.5) for number in range(7)), draw(3, 40, 0.5)]) == [3, 7]


@pytest.mark.parametrize(("tokens", "sure"), [(1, 0.5), (3, 0.9), (40, 0.999), (200, 0.99999)])
def test_answers_that_the_policy_is_sure_of_are_no_copies(tokens: int, sure: float) -> None:
    for begin in range(0, 2000, 8):
        assert list_flagged([draw(begin + number, tokens, sure) for number in range(8)]) == []


def test_a_sure_policy_repeats_itself_but_not_its_exceptions() -> None:
    group = [draw(0, 40, 0.999) for _ in range(8)]
    assert not group[0].response_ids.any()
    assert list_flagged(group) == []
    odd = make_trajectory(40, token_ids=[7, *[3] * 40], logprobs=[math.log(0.001 / 49)] * 40)
    assert list_flagged([*(replace(sample) for sample in group[:6]), odd, replace(odd)]) == [6, 7]


def test_other_observations_or_failures_are_no_copies() -> None:
    sample = draw(1, 30, 0.5)
    other_sample = replace(sample, token_ids=np.array([8, *sample.token_ids[1:]], np.int32))
    assert list_flagged([sample, other_sample]) == [], "the context differs"
    assert list_flagged([failed_trajectory(), failed_trajectory()]) == []
    nothing = [replace(sample, logprobs=np.full(30, np.nan, np.float32)) for _ in range(3)]
    assert list_flagged(nothing) == []


@pytest.mark.parametrize("probabilities", [(0.5, 0.3, 0.2), (0.9, 0.05, 0.05), (0.25, 0.25, 0.25, 0.25)])
def test_the_bound_is_above_the_probability_of_chance(probabilities: tuple[float, ...]) -> None:
    """Over all outcomes of three draws of two tokens."""
    sequences = list(itertools.product(range(len(probabilities)), repeat=2))
    chance = {sequence: math.prod(probabilities[token] for token in sequence) for sequence in sequences}
    for equal, samples in ((2, 2), (2, 3), (3, 3)):
        for p in sorted(set(chance.values())):
            exact = 0.0
            for outcome in itertools.product(sequences, repeat=samples):
                if any(chance[sequence] <= p and outcome.count(sequence) == equal for sequence in set(outcome)):
                    exact += math.prod(chance[sequence] for sequence in outcome)
            assert exact <= math.exp(bound_probability([math.log(p)] * equal, samples)) + 1e-9


def make_group(group: int, tokens: int, *, copies: bool) -> list[Trajectory]:
    """Eight short answers, each token with probability 0.6, or eight copies of one."""
    seeds = [100 * group + (0 if copies else number) for number in range(8)]
    return [replace(draw(seed, tokens, 0.6), group=group, prompt_idx=group) for seed in seeds]


@pytest.mark.parametrize("copies", [False, True])
def test_short_answers_of_many_groups_show_together_what_none_shows_alone(copies: bool) -> None:
    groups = [make_group(number, 3, copies=copies) for number in range(64)]
    for group in groups:
        record_repeated_samples(group, 1.0)
    sure = [response for group in groups for response in group if response.logprobs.sum() > -2.0]
    alone = [response for response in sure if response.reward_metrics.get(REPEATED, 0.0) < -9]
    assert alone == []
    assert (len(find_copies(sure)) > 50) == copies


def test_a_policy_that_is_nearly_sure_is_no_engine_with_one_seed() -> None:
    """Over many groups, whose samples are equal nearly always."""
    for sure in (0.9, 0.98, 0.999):
        outcomes = [replace(draw(seed, 4, sure), group=seed // 8) for seed in range(8 * 500)]
        for begin in range(0, len(outcomes), 8):
            record_repeated_samples(outcomes[begin : begin + 8], 1.0)
        assert find_copies(outcomes) == []


class OneSeed(FakeEngine):
    """An engine that ignores seeds: every response has the same tokens, unlikely ones."""

    async def generate(self, request: Any, settings: Any) -> Any:
        output = await super().generate(request, settings)
        return replace(output, token_ids=np.array([5, 6], np.int32), logprobs=np.array([-9.0, -8.0], np.float32))


def test_a_rollout_of_an_engine_that_ignores_seeds_is_flagged() -> None:
    trajectories = run(OneSeed(), FakeEnvironment())
    expected = (math.log(2) - 2 * 17) / math.log(10)
    assert [trajectory.reward_metrics[REPEATED] for trajectory in trajectories] == [pytest.approx(expected)] * 3
    assert not any(REPEATED in trajectory.reward_metrics for trajectory in run(FakeEngine(), FakeEnvironment()))
    greedy = replace(BATCH_SETTINGS, sampling=replace(BATCH_SETTINGS.sampling, temperature=0.0))
    assert not any(REPEATED in trajectory.reward_metrics for trajectory in run(OneSeed(), FakeEnvironment(), greedy))


def test_the_share_is_a_metric_and_no_figure_of_an_environment() -> None:
    copies = [make_outcome(group=0, reward_metrics={REPEATED: -30.0}) for _ in range(2)]
    outcomes = [*copies, make_outcome(group=1), make_outcome(group=1)]
    metrics = compute_reward_function_metrics(outcomes)
    assert metrics == {"repeated_samples": 0.5}
    assert compute_reward_function_metrics(outcomes[2:]) == {}


def test_a_run_says_it_once_with_counts(tmp_path: Path) -> None:
    run: Any = Run(tmp_path).run
    notes: dict[str, str] = {}
    run.dumps = SimpleNamespace(finish=lambda _step: None)
    run.logger = SimpleNamespace(note_once=notes.setdefault, note=notes.setdefault, log_step=lambda *_: None)
    copies = [make_outcome(30, group=0, prompt_idx=12, reward_metrics={REPEATED: -30.6}) for _ in range(4)]
    sampled = [*copies, *(make_outcome(30, group=1, prompt_idx=13) for _ in range(4))]
    report = StepReport({"valid_tokens": 1.0}, {}, {}, sampled)
    log_step(run, report, report.metrics)
    text = notes["repeated samples"]
    assert "4 of 8 responses, in 1 of 2 groups, have exactly the tokens of another sample of their prompt" in text
    assert "(row 12 of data.train_path: 30 tokens, probability at most 1e-30)" in text
