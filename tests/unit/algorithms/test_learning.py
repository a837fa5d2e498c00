"""Optimizer steps on the samples of a step: which sequences each gets, what is reported, who is blamed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms.learning import combine_results, train_in_minibatches
from megatron_grpo.config.schema import Config, GRPOConfig, LossConfig, PolicyConfig
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.losses.interface import LossFunction
from megatron_grpo.losses.policy_loss import add_derived_metrics
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.policy.interface import NonFiniteGradientError, PolicyInterface, TrainResult


class RecordingPolicy(PolicyInterface):
    """Remembers what it was trained on; its results say which call they are from."""

    def __init__(self, bad_call: int | None = None) -> None:
        self.batches: list[SequenceBatch] = []
        self.bad_call = bad_call

    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        number = len(self.batches)
        if number == self.bad_call:
            raise NonFiniteGradientError(math.nan, [1])
        self.batches.append(batch)
        metrics = {"mean": float(number), "x_max": float(number), "x_min": float(number)}
        return TrainResult(loss=number, grad_norm=2.0 * number, learning_rate=0.1 * number, metrics=metrics)

    def get_logprobs(self, batch: SequenceBatch) -> Tensor:
        raise NotImplementedError

    get_reference_logprobs = get_logprobs

    def sync_reference(self, alpha: float) -> None:
        raise NotImplementedError

    def save_checkpoint(self, folder: str) -> None:
        raise NotImplementedError

    load_checkpoint = save_checkpoint

    def shutdown(self) -> None:
        raise NotImplementedError

    @property
    def shape(self) -> ModelShape:
        raise NotImplementedError

    @property
    def device_name(self) -> str:
        return "cpu"


def loss_fn(*_: object) -> tuple[Tensor, dict[str, Tensor]]:
    raise AssertionError("the fake policy computes no loss")


def make_batch() -> SequenceBatch:
    """Six sequences; the tokens of sequence i are all i, and i of them are in the loss."""
    lengths = [6, 6, 6, 6, 6, 6]
    ids = torch.arange(6).repeat_interleave(6)
    mask = torch.cat([(torch.arange(6) < i).float() for i in range(6)])
    return SequenceBatch(lengths, ids, {"loss_mask": mask, "prev_logprobs": -ids.float()})


def test_every_pass_goes_over_all_sequences_in_order() -> None:
    policy = RecordingPolicy()
    train_in_minibatches(policy, make_batch(), loss_fn, samples=2, iterations=2)
    seen = [sorted(set(batch.token_ids.tolist())) for batch in policy.batches]
    assert seen == [[0, 1], [2, 3], [4, 5]] * 2
    for batch in policy.batches:
        assert torch.equal(batch.tokens["prev_logprobs"], -batch.token_ids.float())


def test_metrics_are_means_over_tokens_and_extremes() -> None:
    policy = RecordingPolicy()
    result = train_in_minibatches(policy, make_batch(), loss_fn, samples=2, iterations=1)
    assert result is not None
    tokens = [0 + 1, 2 + 3, 4 + 5]
    assert result.metrics["mean"] == pytest.approx(sum(i * n for i, n in enumerate(tokens)) / sum(tokens))
    assert (result.metrics["x_max"], result.metrics["x_min"]) == (2, 0)
    assert (result.loss, result.grad_norm, result.learning_rate) == (1.0, 2.0, 0.2)


def test_a_single_optimizer_step_is_reported_as_it_is() -> None:
    only = TrainResult(loss=1 / 3, grad_norm=0.1, learning_rate=1e-3, metrics={"mean": 1 / 7})
    assert combine_results([only], [5.0]) is only


def test_sequences_without_a_token_in_the_loss_get_no_optimizer_step() -> None:
    """Momentum and weight decay would move the weights all the same."""
    policy, batch = RecordingPolicy(), make_batch()
    batch.tokens["loss_mask"][12:24] = 0  # sequences 2 and 3
    result = train_in_minibatches(policy, batch, loss_fn, samples=2, iterations=2)
    assert result is not None
    assert [sorted(set(one.token_ids.tolist())) for one in policy.batches] == [[0, 1], [4, 5]] * 2
    assert result.optimizer_steps == 4
    batch.tokens["loss_mask"].zero_()
    assert train_in_minibatches(RecordingPolicy(bad_call=0), batch, loss_fn, samples=2, iterations=2) is None


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
        train_in_minibatches(RecordingPolicy(bad_call=2), make_batch(), loss_fn, samples=2, iterations=1)
    assert caught.value.sequences == [5]


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
