"""Optimizer steps on the samples of a step: which sequences each gets, what is reported, who is blamed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.records import StepCheck
from megatron_grpo.algorithms.stages import combine_results, train_in_minibatches, train_policy, train_value_model
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config, GRPOConfig, LossConfig, PolicyConfig
from megatron_grpo.losses.loss import LossFunction
from megatron_grpo.losses.policy_loss import add_derived_metrics
from megatron_grpo.trainer.model_ranks import NonFiniteGradientError, TrainResult
from tests.support.fake_models import FakePolicy, Lesson, fetched
from tests.support.fake_rollouts import FakeRollouts, add_entry
from tests.support.trajectories import make_trajectory


class RecordingPolicy(FakePolicy):
    """Remembers what it was trained on; its results say which call they are from."""

    def __init__(self, bad_call: int | None = None) -> None:
        super().__init__(shape=None)  # type: ignore[arg-type]
        self.bad_call = bad_call

    def train(self, batch: StepBatch, sequences: NDArray[np.int64], loss_fn: LossFunction) -> TrainResult:
        number = len(self.lessons)
        if number == self.bad_call:
            raise NonFiniteGradientError(math.nan, [int(sequences[1])])
        tokens = fetched(batch, sequences, ("token_ids", "sampled", "prev_logprobs"))
        self.lessons.append(Lesson(sequences.tolist(), tokens))
        metrics = {"mean": float(number), "x_max": float(number), "x_min": float(number)}
        return TrainResult(loss=number, grad_norm=2.0 * number, learning_rate=0.1 * number, metrics=metrics)

    @property
    def sequences(self) -> list[list[int]]:
        """Numbers of the sequences of each optimizer step, as their tokens tell them."""
        tokens = [sorted({row[0] for row in lesson.entry("token_ids")}) for lesson in self.lessons]
        assert tokens == [lesson.sequences for lesson in self.lessons]
        return tokens  # type: ignore[return-value]


def loss_fn(*_: object) -> tuple[Tensor, dict[str, Tensor]]:
    raise AssertionError("the fake policy computes no loss")


NO_LOSS: Any = loss_fn


def make_batch(shards: int = 2) -> StepBatch:
    """Six sequences of six tokens, all i in sequence i, whose last i are sampled and in the loss."""
    rollouts: Any = FakeRollouts()
    trajectories = [make_trajectory(i, prompt_tokens=6 - i, token_ids=[i] * 6) for i in range(6)]
    numbers = [np.arange(shard, 6, shards) for shard in range(shards)]
    batch = StepBatch(lengths=np.full(6, 6), response_tokens=np.arange(6), in_loss=np.ones(6, dtype=np.bool_))
    batch.partitions = numbers
    batch.fields = rollouts.build_partitions(rollouts.put([trajectories]), numbers)
    add_entry(batch, "prev_logprobs", -np.repeat(np.arange(6), 6))
    return batch


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_pass_goes_over_all_sequences_in_order(shards: int) -> None:
    policy = RecordingPolicy()
    train_in_minibatches(policy, make_batch(shards), NO_LOSS, samples=2, iterations=2)
    assert policy.sequences == [[0, 1], [2, 3], [4, 5]] * 2
    for lesson in policy.lessons:
        assert lesson.entry("prev_logprobs") == [[-float(i)] * 6 for i in lesson.sequences]
        assert lesson.entry("loss_mask") == [[0.0] * (6 - i) + [1.0] * i for i in lesson.sequences]


def test_a_last_minibatch_may_be_smaller() -> None:
    policy = RecordingPolicy()
    train_in_minibatches(policy, make_batch(), NO_LOSS, samples=4, iterations=1)
    assert policy.sequences == [[0, 1, 2, 3], [4, 5]]


def test_metrics_are_means_over_tokens_and_extremes() -> None:
    policy = RecordingPolicy()
    result = train_in_minibatches(policy, make_batch(), NO_LOSS, samples=2, iterations=1)
    assert result is not None
    tokens = [0 + 1, 2 + 3, 4 + 5]
    assert result.metrics["mean"] == pytest.approx(sum(i * n for i, n in enumerate(tokens)) / sum(tokens))
    assert (result.metrics["x_max"], result.metrics["x_min"]) == (2, 0)
    assert (result.loss, result.grad_norm, result.learning_rate) == (1.0, 2.0, 0.2)


def test_only_tokens_in_the_loss_weigh() -> None:
    policy, batch = RecordingPolicy(), make_batch()
    batch.in_loss[[3, 4]] = False
    result = train_in_minibatches(policy, batch, NO_LOSS, samples=2, iterations=1)
    assert result is not None
    tokens = [0 + 1, 2, 5]
    assert result.metrics["mean"] == pytest.approx(sum(i * n for i, n in enumerate(tokens)) / sum(tokens))


def test_a_single_optimizer_step_is_reported_as_it_is() -> None:
    only = TrainResult(loss=1 / 3, grad_norm=0.1, learning_rate=1e-3, metrics={"mean": 1 / 7})
    assert combine_results([only], [5.0]) is only


def test_the_memory_of_a_step_is_that_of_its_largest_optimizer_step() -> None:
    results = [TrainResult(loss=0, grad_norm=0, learning_rate=0, gpu_memory_gib=peak) for peak in (3.0, 7.0, 5.0)]
    assert combine_results(results, [1.0, 1.0, 1.0]).gpu_memory_gib == 7.0


def test_sequences_without_a_token_in_the_loss_get_no_optimizer_step() -> None:
    """Momentum and weight decay would move the weights all the same."""
    policy, batch = RecordingPolicy(), make_batch()
    batch.in_loss[2:4] = False
    result = train_in_minibatches(policy, batch, NO_LOSS, samples=2, iterations=2)
    assert result is not None
    assert policy.sequences == [[0, 1], [4, 5]] * 2
    assert result.optimizer_steps == 4
    batch.in_loss[:] = False
    assert train_in_minibatches(RecordingPolicy(bad_call=0), batch, NO_LOSS, samples=2, iterations=2) is None
    nothing_sampled = make_batch()
    nothing_sampled.response_tokens[:] = 0
    assert train_in_minibatches(RecordingPolicy(bad_call=0), nothing_sampled, NO_LOSS, samples=2, iterations=2) is None


def test_imitation_is_weighted_by_the_tokens_that_are_imitated() -> None:
    """Two optimizer steps, only the first with a correct response: the mean over its tokens, not half of it."""
    moments = {"sampling_importance_ratio": 1.0, "sampling_importance_ratio_squared": 1.0}
    shares = [{"positive_nll_share": 0.8, "positive_share": 0.4}, {"positive_nll_share": 0.0, "positive_share": 0.0}]
    results = [TrainResult(loss=0, grad_norm=0, learning_rate=0, metrics={**moments, **share}) for share in shares]
    metrics = combine_results(results, [10.0, 10.0]).metrics
    add_derived_metrics(metrics)
    assert metrics["positive_nll"] == pytest.approx(2.0)
    assert metrics["positive_share"] == pytest.approx(0.2)


def test_a_bad_gradient_names_sequences_of_the_whole_batch() -> None:
    with pytest.raises(NonFiniteGradientError) as caught:
        train_in_minibatches(RecordingPolicy(bad_call=2), make_batch(), NO_LOSS, samples=2, iterations=1)
    assert caught.value.sequences == [5]


@pytest.mark.parametrize(("of_values", "cause"), [(False, "the gradient"), (True, "the value model's gradient")])
def test_a_bad_gradient_ends_the_run_and_names_the_prompts(of_values: bool, cause: str, tmp_path: Path) -> None:
    rollouts = FakeRollouts()
    pairs = [[make_trajectory(prompt_idx=30 + 2 * i + j, sample=j) for j in range(2)] for i in range(3)]
    groups = rollouts.put(pairs)
    check = StepCheck(tmp_path, rollouts.fetch, groups, step=4)
    config = Config(algorithm="ppo" if of_values else "grpo", policy=PolicyConfig(train_global_batch_samples=2))
    config.value.train_global_batch_samples = 2
    stage, model = (train_value_model if of_values else train_policy), RecordingPolicy(bad_call=2)
    with pytest.raises(RunError, match=rf"step 4: {cause} is not finite for 1 response\(s\) to prompt\(s\) 35 of"):
        stage(config, make_batch(), model, NO_LOSS, check)  # type: ignore[operator]
    written = json.loads((tmp_path / "non_finite_step_4.json").read_text())
    assert [row["prompt_idx"] for row in written["trajectories"]] == [35]
    assert rollouts.fetched == groups[2:], "only what it is about comes to the driver"
    assert len(model.lessons) == 2


def test_a_value_model_has_minibatches_of_its_own() -> None:
    config = Config(algorithm="ppo", policy=PolicyConfig(train_global_batch_samples=3))
    config.value.train_global_batch_samples = 2
    config.ppo.ppo_epochs = 2
    model, check = RecordingPolicy(), StepCheck(Path(), FakeRollouts().fetch, [], step=1)
    add_moments(model)
    metrics = train_value_model(config, make_batch(), model, NO_LOSS, check)  # type: ignore[arg-type]
    assert model.sequences == [[0, 1], [2, 3], [4, 5]] * 2
    assert metrics["value_loss"] == pytest.approx(2.5)
    assert metrics["value_grad_norm"] == pytest.approx(5.0)
    assert metrics["value_learning_rate"] == pytest.approx(0.5)


def add_moments(model: RecordingPolicy) -> None:
    """Have the model report what the explained variance is made of."""
    train = model.train

    def with_moments(*arguments: Any) -> TrainResult:
        result = train(*arguments)
        result.metrics |= dict.fromkeys(("return_mean", "return_squared", "value_error", "value_error_squared"), 1.0)
        return result

    model.train = with_moments  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("settings", "optimizer_steps", "needed"),
    [
        ({}, 1, False),
        ({"num_iterations": 3}, 3, True),
        ({"minibatch": 16}, 4, True),
        ({"num_iterations": 2, "minibatch": 32}, 4, True),
        ({"minibatch": 64}, 1, False),
        ({"seq_logprob_error_threshold": 1.5}, 1, True),
        ({"use_kl_in_reward": True}, 1, True),
    ],
)
def test_old_logprobs_are_computed_only_when_they_differ(
    settings: dict[str, float], optimizer_steps: int, needed: bool
) -> None:
    minibatch = settings.pop("minibatch", None)
    loss_fn = LossConfig(use_kl_in_reward=bool(settings.pop("use_kl_in_reward", False)))
    grpo = GRPOConfig(num_prompts_per_step=8, num_generations_per_prompt=8, max_num_steps=10, **settings)
    config = Config(grpo=grpo, loss_fn=loss_fn, policy=PolicyConfig(train_global_batch_samples=minibatch))
    assert config.optimizer_steps_per_step == optimizer_steps
    assert config.decay_steps == 10 * optimizer_steps
    assert config.needs_prev_logprobs is needed
