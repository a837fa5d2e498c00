"""What a step of GRPO asks of the policy, and in which cases; the run around it is faked, its arithmetic is not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.algorithms import samples
from megatron_grpo.algorithms.step_advantages import score
from megatron_grpo.batch.replay_files import locate_figures_file, read_figures
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.run.directory import override_values
from tests.support.documents import undocumented
from tests.support.fake_rollouts import FakeRay
from tests.support.grpo_run import EVERYTHING, KL_IN_REWARD, Run
from tests.support.trajectories import make_trajectory


@pytest.fixture(autouse=True)
def without_ray(fake_ray: FakeRay) -> FakeRay:
    return fake_ray


def test_the_stages_follow_each_other(tmp_path: Path, without_ray: FakeRay) -> None:
    everything = ["loss_fn.reference_policy_kl_penalty=0.1", "grpo.num_iterations=2"]
    run = Run(tmp_path, *everything)
    run.step()
    learns = ["policy learns"] * 2
    assert run.log == ["policy says", "reference says", "dump 1 begins", *learns, "version 1"]
    run.step()
    assert run.log[6:] == ["policy says", "reference says", "dump 2 begins", *learns, "version 2"]
    assert run.rollouts.fetched == [], "no token comes to the driver"
    assert run.rollouts.computed == ["measure_prob_error"], "of the whole step, unless its tokens are of older weights"
    assert without_ray.gets == 0


def test_a_step_that_is_recorded_learns_as_any_other(tmp_path: Path) -> None:
    run = Run(tmp_path, "logger.replay_every=2")
    run.step()
    assert run.log == ["dump 1 begins", "policy learns", "version 1"]
    assert read_figures(locate_figures_file(tmp_path, 1)) is None
    report = run.step()
    steps = ["policy says", "dump 2 begins", "record begins", "policy learns", "record ends", "version 2"]
    assert run.log[3:] == steps
    first, second = run.policy.lessons
    assert second.tokens.fields.prev_logprobs is None, "log-probabilities are for the record, not for the loss"
    assert second.tokens.fields.as_dict().keys() == first.tokens.fields.as_dict().keys()
    figures = read_figures(locate_figures_file(tmp_path, 2))
    assert figures is not None
    assert (figures.loss, figures.grad_norm) == (report.metrics["loss"], report.metrics["grad_norm"])
    assert figures.tensors == run.policy.end_record()
    assert figures.states == run.policy.end_states()
    assert len(figures.states) > 1
    assert override_values(figures.config, [], "the file") == run.run.config


def test_a_recorded_step_that_needs_log_probabilities_uses_them(tmp_path: Path) -> None:
    run = Run(tmp_path, "logger.replay_every=1", "grpo.num_iterations=2")
    run.step()
    assert all(lesson.tokens.fields.prev_logprobs is not None for lesson in run.policy.lessons)


def test_what_was_sampled_is_what_is_trained_on_dumped_and_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    report = run.step()
    (lesson,) = run.policy.lessons
    assert lesson.sequences == [0, 1, 2, 3]
    assert lesson.entry("sampled") == [[False, True, True, True]] * 4
    third = pytest.approx(-1 / 3)
    assert lesson.entry("generation_logprobs") == [[0.0, third, third, third]] * 4
    assert lesson.tokens.fields.prev_logprobs is None, "one optimizer step needs none"
    outcomes = [outcome for group in run.run.dumps.groups[1] for outcome in group.outcomes]
    assert outcomes == report.sampled
    assert outcomes == [outcome.outcome for outcome in run.trajectories]


def test_scores_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every response that was sampled, whether dynamic sampling asks for them or only the advantages do."""
    scored_outcomes: list[Outcome] = []

    def counted(config: Config, outcomes: list[Outcome]) -> Any:
        scored_outcomes.extend(outcomes)
        return score(config, outcomes)

    monkeypatch.setattr(samples, "score", counted)
    for dynamic in ("false", "true"):
        run = Run(tmp_path, f"grpo.use_dynamic_sampling={dynamic}")
        run.step()
        assert scored_outcomes == [trajectory.outcome for trajectory in run.trajectories]
        scored_outcomes.clear()


def test_the_reference_moves_when_it_is_due(tmp_path: Path) -> None:
    sync = ["grpo.sync_ref_model=true", "grpo.ref_model_sync_steps=2", "grpo.ref_model_mixup_alpha=0.3"]
    run = Run(tmp_path, "loss_fn.reference_policy_kl_penalty=0.1", *sync)
    moved = []
    for _ in range(4):
        run.step()
        moved.append(len(run.policy.moved))
    assert moved == [0, 1, 1, 2]
    assert run.policy.moved == [0.3, 0.3]
    assert [line for line in run.log if line.endswith("says")] == ["reference says"] * 4


def test_an_inconsistent_response_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, "grpo.seq_logprob_error_threshold=1.5")
    run.policy.logprobs = {2: -1.0}
    report = run.step()
    assert run.in_loss() == [3, 3, 0, 3]
    assert report.metrics["num_masked_seqs"] == 1
    assert report.metrics["max_seq_mult_prob_error"] == pytest.approx(math.exp(2 / 3))
    assert report.metrics["valid_tokens"] == 9


def test_without_a_token_in_the_loss_nothing_is_trained_or_made_up(tmp_path: Path) -> None:
    run = Run(tmp_path, "grpo.overlong_filtering=true")
    run.trajectories = [replace(trajectory, stop_reason="length") for trajectory in run.trajectories]
    report = run.step()
    assert run.policy.lessons == []
    assert (report.metrics["optimizer_steps"], report.metrics["valid_tokens"]) == (0, 0)
    assert report.metrics.keys().isdisjoint({"loss", "token_mult_prob_error", "probs_ratio_min", "grad_norm"})
    assert all(map(math.isfinite, report.metrics.values()))
    assert run.log[-1] == "version 1", "versions count steps all the same"


def test_optimizer_steps_are_those_that_were_made(tmp_path: Path) -> None:
    minibatches = ["policy.train_global_batch_samples=2", "grpo.num_iterations=3", "grpo.overlong_filtering=true"]
    run = Run(tmp_path, *minibatches)
    run.step()
    run.trajectories[:2] = [replace(trajectory, stop_reason="length") for trajectory in run.trajectories[:2]]
    report = run.step()
    assert [lesson.sequences for lesson in run.policy.lessons] == [[0, 1], [2, 3]] * 3 + [[2, 3]] * 3
    assert report.metrics["optimizer_steps"] == 3
    devices = run.run.config.policy.parallel.world_size
    worked = report.throughput["train_tflops_per_device"] * devices * report.timing["train"]
    flops = 3 * count_forward_flops(run.policy.shape, [4, 4]) / 1e12
    assert worked == pytest.approx(3 * flops), "three passes, forward and backward, over the half that was trained on"


def test_a_penalty_in_the_reward_has_to_be_finite_also_where_there_is_no_loss(tmp_path: Path) -> None:
    """A response that is filtered out is in the baseline of its mates; infinite, it would make theirs infinite."""
    kl = ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1", "grpo.normalize_rewards=false"]
    run = Run(tmp_path, "grpo.overlong_filtering=true", *kl)
    run.trajectories[3] = replace(run.trajectories[3], stop_reason="length")
    run.policy.logprobs = {3: -math.inf}
    with pytest.raises(RunError, match=r"a value of prev_logprobs is not finite for 1 response\(s\) to prompt\(s\) 1"):
        run.step()
    assert json.loads((tmp_path / "non_finite_step_1.json").read_text())["prompt_ids"] == [1]
    assert run.policy.lessons == []


def test_a_penalty_in_the_loss_need_not_be_finite_where_there_is_no_loss(tmp_path: Path) -> None:
    run = Run(tmp_path, "grpo.overlong_filtering=true", "loss_fn.reference_policy_kl_penalty=0.1")
    run.trajectories[3] = replace(run.trajectories[3], stop_reason="length")
    run.policy.logprobs = {3: -math.inf}
    assert math.isfinite(run.step().metrics["loss"])
    assert run.in_loss() == [3, 3, 3, 0]


def test_a_reference_that_is_not_finite_stops_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path, "loss_fn.reference_policy_kl_penalty=0.1")
    run.policy.logprobs = {3: -math.inf}
    with pytest.raises(
        RunError, match=r"a value of reference_logprobs is not finite for 1 response\(s\) to prompt\(s\) 1"
    ):
        run.step()
    assert [line for line in run.log if line.endswith("says")] == ["reference says"]
    assert run.policy.lessons == []


def test_advantages_that_are_not_finite_stop_the_step(tmp_path: Path) -> None:
    """Rewards that float32 can hold, and whose difference it cannot."""
    run = Run(tmp_path, "grpo.normalize_rewards=false")
    run.trajectories[2].reward, run.trajectories[3].reward = 3e38, -3e38
    with pytest.raises(RunError, match=r"a value of advantages is not finite for 2 response\(s\) to prompt\(s\) 1"):
        run.step()
    assert run.policy.lessons == []
    assert [step for step, _, _ in run.run.dumps.held] == [1], "its rollouts are written without a lesson"
    written = json.loads((tmp_path / "non_finite_step_1.json").read_text())
    assert written["advantages"] == [["Infinity"], ["-Infinity"]]
    assert [row["sample"] for row in written["trajectories"]] == [0, 1]


def test_advantages_need_not_be_finite_where_there_is_no_loss(tmp_path: Path) -> None:
    run = Run(tmp_path, "grpo.normalize_rewards=false", "grpo.overlong_filtering=true")
    for index, reward in ((2, 3e38), (3, -3e38)):
        run.trajectories[index] = replace(run.trajectories[index], reward=reward, stop_reason="length")
    assert math.isfinite(run.step().metrics["loss"])
    assert run.in_loss() == [3, 3, 0, 0]


def test_a_response_without_a_reward_is_in_no_figure(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trajectories[1].reward = None
    report = run.step()
    assert report.metrics["reward"] == pytest.approx(2 / 3)
    assert report.metrics["groups_without_signal"] == 0.5
    assert report.metrics["unscored_rate"] == 0.25
    assert report.metrics["valid_tokens"] == 9


def test_what_dynamic_sampling_dropped_is_in_the_figures_of_sampling(tmp_path: Path) -> None:
    """By hand: two pairs of three tokens with one right each are trained on; a right pair was dropped."""
    run = Run(tmp_path, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5")
    run.dropped = [
        make_trajectory(5, prompt_idx=2, group=2, sample=i, reward=1.0, stop_reason="length") for i in range(2)
    ]
    for trajectory in run.trajectories + run.dropped:
        trajectory.correct, trajectory.reward_parts = trajectory.reward == 1.0, {"right": trajectory.reward or 0.0}
    report = run.step()
    metrics = report.metrics
    expected = {
        "reward": 4 / 6,
        "reward/right": 4 / 6,
        "reward_std": 2 * math.sqrt(0.5) / 3,
        "accuracy": 4 / 6,
        "groups_all_wrong": 0,
        "groups_mixed": 2 / 3,
        "groups_all_right": 1 / 3,
        "response_length": 22 / 6,
        "response_length_max": 5,
        "response_length_p50": 3,
        "response_length_p90": 5,
        "truncation_rate": 2 / 6,
        "natural_termination_rate": 4 / 6,
        "filtered_reward": 0.5,
        "groups_without_signal": 0,
        "dynamic_sampling_groups_without_signal": 1,
        "valid_tokens": 12,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    trained_on = run.run.dumps.groups[1]
    assert [[outcome.prompt_idx for outcome in group.outcomes] for group in trained_on] == [[0, 0], [1, 1]]
    assert len(report.sampled) == 6, "what was dropped is told of, too"
    assert report.throughput["samples_per_s"] * report.timing["total"] == pytest.approx(4), "that were trained on"
    assert report.throughput["gpu_memory_gib"] == 3.5


@pytest.mark.parametrize("right", [True, None])
def test_outcomes_are_reported_where_they_are_known(right: bool | None, tmp_path: Path) -> None:
    run = Run(tmp_path)
    for trajectory in run.trajectories:
        trajectory.correct = right
    metrics = run.step().metrics
    assert ("accuracy" in metrics, "groups_all_right" in metrics) == (right is True, right is True)


def test_every_metric_is_documented(tmp_path: Path) -> None:
    options = [
        "grpo.seq_logprob_error_threshold=1.5",
        "grpo.use_dynamic_sampling=true",
        "loss_fn.reference_policy_kl_penalty=0.1",
        "loss_fn.positive_example_nll_weight=0.1",
        "loss_fn.use_importance_sampling_correction=true",
    ]
    run = Run(tmp_path, *options)
    for trajectory in run.trajectories:
        trajectory.reward_parts, trajectory.correct = {"one": 1.0}, True
    metrics = run.step().metrics
    assert {"kl_penalty", "positive_nll", "is_oob_ratio", "filtered_reward", "reward_std/one"} <= metrics.keys()
    assert undocumented(metrics) == set()
    assert undocumented(["no_such_metric", "response_length_p51"]) == {"no_such_metric", "response_length_p51"}


@pytest.mark.parametrize(
    "options",
    [
        [],
        EVERYTHING,
        [*KL_IN_REWARD, "grpo.normalize_rewards=false"],
        [*KL_IN_REWARD, "grpo.adv_estimator.name=reinforce_plus_plus"],
        ["policy.train_global_batch_samples=2"],
    ],
    ids=["plain", "everything", "penalty in the reward", "reinforce++", "minibatches"],
)
def test_the_layout_changes_no_figure(options: list[str], tmp_path: Path) -> None:
    """Responses of many lengths in one shard and in two: what is learnt from which token is the same."""
    metrics, lessons = [], []
    for replicas in (1, 2):
        run = Run(tmp_path, f"policy.parallel.data={replicas}", *options)
        run.trajectories = [
            make_trajectory(
                7 - 2 * i,
                prompt_tokens=1 + i,
                prompt_idx=i // 2,
                group=i // 2,
                sample=i % 2,
                reward=reward,
                correct=i > 1,
            )
            for i, reward in enumerate([0.25, 1.0, 0.5, 0.0])
        ]
        run.policy.logprobs, run.policy.reference_offset = {1: -0.5}, -0.125
        metrics.append(run.step().metrics)
        lessons.append(
            [(lesson.sequences, lesson.entry("advantages"), lesson.entry("loss_mask")) for lesson in run.policy.lessons]
        )
    assert lessons[0] == lessons[1]
    assert metrics[0] == metrics[1]
