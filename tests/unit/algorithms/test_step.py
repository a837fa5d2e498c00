"""What a step of GRPO asks of the policy, and in which cases; the run around it is faked, its arithmetic is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron_grpo.preflight.load import compose_config
from torch import Tensor

from megatron_grpo.algorithms import grpo, step
from megatron_grpo.algorithms.sampling import StepSamples
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.losses.interface import GlobalCounts, LossFunction
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.source import known_shape
from megatron_grpo.observability.throughput import forward_flops
from megatron_grpo.policy.interface import TrainResult
from megatron_grpo.run.step_report import StepReport
from megatron_grpo.run.save_state import default_grpo_save_state
from tests.support.documented import undocumented
from tests.support.trajectories import make_trajectory

REWARDS = [1.0, 0.0, 1.0, 0.0]


class FakePolicy:
    """A policy of one process that takes the real loss but learns nothing; its log-probabilities are `logprobs`."""

    device_name = "cpu"
    shape = known_shape(compose_config(["+exp=quickstart"]))

    def __init__(self) -> None:
        self.batches: list[SequenceBatch] = []
        self.asked: list[str] = []
        self.moved: list[float] = []
        self.logprobs: dict[int, float] = {}
        """By sequence, where they are not those of sampling."""

    def get_logprobs(self, batch: SequenceBatch) -> Tensor:
        self.asked.append("policy")
        return self._of(batch)

    def get_reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        self.asked.append("reference")
        return self._of(batch)

    def sync_reference(self, alpha: float) -> None:
        self.moved.append(alpha)

    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        self.batches.append(batch)
        tokens = {name: values[None] for name, values in batch.tokens.items()}
        _, metrics = loss_fn(batch.tokens["generation_logprobs"][None], tokens, GlobalCounts.of(batch))
        found = {name: float(value) for name, value in metrics.items()}
        return TrainResult(loss=found.pop("loss"), grad_norm=1.0, learning_rate=0.1, metrics=found)

    def _of(self, batch: SequenceBatch) -> Tensor:
        pieces = list(batch.tokens["generation_logprobs"].clone().split(batch.lengths))
        for index, value in self.logprobs.items():
            pieces[index].fill_(value)
        return torch.cat(pieces)


class Run:
    """A run of two groups of two responses, and what it printed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        sizes = ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2"]
        self.config = compose_config(["+exp=quickstart", *sizes, *overrides])
        self.state = default_grpo_save_state()
        self.policy = FakePolicy()
        self.loss_fn = ClippedPGLossFn(self.config.loss_fn)
        self.notes: list[str] = []
        self.logger = SimpleNamespace(run_dir=folder, note=self.notes.append)
        self.transport = SimpleNamespace(publish=lambda version: SimpleNamespace(bytes_sent=8))
        self.trajectories = [
            make_trajectory(3, prompt_idx=i // 2, group=i // 2, sample=i % 2, reward=reward)
            for i, reward in enumerate(REWARDS)
        ]
        self.dropped: list[Trajectory] = []
        """Sampled besides these, and not trained on."""
        monkeypatch.setattr(
            step, "sample_step", lambda *_: StepSamples(self.trajectories, self.trajectories + self.dropped)
        )

    def step(self) -> StepReport:
        report = grpo.grpo_step(self, iter([]))  # type: ignore[arg-type]
        assert report is not None
        self.state["total_steps"] += 1
        return report


def test_the_reference_moves_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = ["grpo.sync_ref_model=true", "grpo.ref_model_sync_steps=2", "grpo.ref_model_mixup_alpha=0.3"]
    run = Run(tmp_path, monkeypatch, "loss_fn.reference_policy_kl_penalty=0.1", *sync)
    moved = []
    for _ in range(4):
        run.step()
        moved.append(len(run.policy.moved))
    assert moved == [0, 1, 1, 2]
    assert run.policy.moved == [0.3, 0.3]
    assert run.policy.asked == ["reference"] * 4


def test_an_inconsistent_response_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, "grpo.seq_logprob_error_threshold=1.5")
    run.policy.logprobs = {2: -1.0}
    report = run.step()
    (trained,) = run.policy.batches
    in_loss = [piece.sum().item() for piece in trained.tokens["loss_mask"].split(trained.lengths)]
    assert in_loss == [3, 3, 0, 3]
    assert report.metrics["num_masked_seqs"] == 1
    assert report.metrics["max_seq_mult_prob_error"] == pytest.approx(math.exp(2 / 3))
    assert report.metrics["valid_tokens"] == 9


def test_without_a_token_in_the_loss_nothing_is_trained_or_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, "grpo.overlong_filtering=true")
    for trajectory in run.trajectories:
        trajectory.stop_reason = "length"
    report = run.step()
    assert run.policy.batches == []
    assert (report.metrics["optimizer_steps"], report.metrics["valid_tokens"]) == (0, 0)
    assert report.metrics.keys().isdisjoint({"loss", "token_mult_prob_error", "probs_ratio_min", "grad_norm"})
    assert all(map(math.isfinite, report.metrics.values()))
    assert run.notes == ["step 1: no response is in the loss, so nothing is learnt from it"]


def test_optimizer_steps_are_those_that_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minibatches = ["policy.train_global_batch_samples=2", "grpo.num_iterations=3", "grpo.overlong_filtering=true"]
    run = Run(tmp_path, monkeypatch, *minibatches)
    run.step()
    for trajectory in run.trajectories[:2]:
        trajectory.stop_reason = "length"
    report = run.step()
    assert report.metrics["optimizer_steps"] == 3
    devices = run.config.policy.parallel.world_size
    worked = report.throughput["train_tflops_per_device"] * devices * report.timing["train"]
    flops = 3 * forward_flops(run.policy.shape, [4, 4]) / 1e12
    assert worked == pytest.approx(3 * flops), "three passes, forward and backward, over the half that was trained on"


def test_a_penalty_in_the_reward_has_to_be_finite_also_where_there_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that is filtered out is in the baseline of its mates; infinite, it would make theirs infinite."""
    kl = ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1", "grpo.normalize_rewards=false"]
    run = Run(tmp_path, monkeypatch, "grpo.overlong_filtering=true", *kl)
    run.trajectories[3].stop_reason = "length"
    run.policy.logprobs = {3: -math.inf}
    with pytest.raises(RunError, match=r"an entry of prev_logprobs is not finite for 1 response\(s\) to prompt\(s\) 1"):
        run.step()
    assert json.loads((tmp_path / "non_finite_step_1.json").read_text())["prompt_ids"] == [1]
    assert run.policy.batches == []


def test_a_reference_that_is_not_finite_stops_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, "loss_fn.reference_policy_kl_penalty=0.1")
    run.policy.logprobs = {3: -math.inf}
    with pytest.raises(
        RunError, match=r"an entry of reference_logprobs is not finite for 1 response\(s\) to prompt\(s\) 1"
    ):
        run.step()
    assert run.policy.asked == ["reference"]
    assert run.policy.batches == []


def test_advantages_that_are_not_finite_stop_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that float32 can hold, and whose difference it cannot."""
    run = Run(tmp_path, monkeypatch, "grpo.normalize_rewards=false")
    run.trajectories[2].reward, run.trajectories[3].reward = 3e38, -3e38
    with pytest.raises(RunError, match=r"an entry of advantages is not finite for 2 response\(s\) to prompt\(s\) 1"):
        run.step()
    assert run.policy.batches == []


def test_a_response_without_a_reward_is_in_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    run.trajectories[1].reward = None
    report = run.step()
    assert report.metrics["reward"] == pytest.approx(2 / 3)
    assert report.metrics["groups_without_signal"] == 0.5
    assert report.metrics["unscored_rate"] == 0.25
    assert report.metrics["valid_tokens"] == 9


def test_what_dynamic_sampling_dropped_is_in_the_figures_of_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: two pairs of three tokens, one right in each, are trained on; a right pair of five was dropped."""
    run = Run(tmp_path, monkeypatch, "grpo.use_dynamic_sampling=true")
    run.dropped = [make_trajectory(5, group=2, sample=i, reward=1.0, stop_reason="length") for i in range(2)]
    for trajectory in run.trajectories + run.dropped:
        trajectory.correct, trajectory.reward_parts = trajectory.reward == 1.0, {"right": trajectory.reward or 0.0}
    metrics = run.step().metrics
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
        "valid_tokens": 12,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("right", [True, None])
def test_outcomes_are_reported_where_they_are_known(
    right: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch)
    for trajectory in run.trajectories:
        trajectory.correct = right
    metrics = run.step().metrics
    assert ("accuracy" in metrics, "groups_all_right" in metrics) == (right is True, right is True)


def test_every_metric_is_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        "grpo.seq_logprob_error_threshold=1.5",
        "grpo.use_dynamic_sampling=true",
        "loss_fn.reference_policy_kl_penalty=0.1",
        "loss_fn.positive_example_nll_weight=0.1",
        "loss_fn.use_importance_sampling_correction=true",
    ]
    run = Run(tmp_path, monkeypatch, *options)
    for trajectory in run.trajectories:
        trajectory.reward_parts, trajectory.correct = {"one": 1.0}, True
    metrics = run.step().metrics
    assert {"kl_penalty", "positive_nll", "is_oob_ratio", "filtered_reward", "reward_std/one"} <= metrics.keys()
    assert undocumented(metrics) == set()
    assert undocumented(["no_such_metric", "response_length_p51"]) == {"no_such_metric", "response_length_p51"}
