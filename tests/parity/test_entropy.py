"""Entropy with the vocabulary split over tensor-parallel ranks, alone and in the loss of the policy."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.policy.modeling.logprobs import token_entropy, vocab_shard
from tests.parity.policy_training import hf_loss, make_batch, make_engine, train_arguments, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merged
from tests.support.tiny_models import TinyModel

VOCAB, PADDED, TEMPERATURE = 11, 16, 0.7


def problem() -> tuple[Tensor, Tensor]:
    """Logits [2, 5, PADDED], with one rank's part far above the other's, and weights [2, 5]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, PADDED, generator=generator) * 2
    logits[0, 1, : PADDED // 2] += 30
    return logits, torch.randn(2, 5, generator=generator)


def entropy_on_rank(layout: Layout) -> tuple[Tensor, Tensor]:
    """The entropies, and the gradient for this rank's columns."""
    group = parallel_state.get_tensor_model_parallel_group()
    logits, weights = problem()
    local = logits.chunk(group.size(), dim=-1)[group.rank()].clone().requires_grad_()
    entropy = token_entropy(local, vocab_shard(VOCAB, local.shape[-1], group), temperature=TEMPERATURE, chunk_tokens=3)
    (entropy * weights).sum().backward()
    assert local.grad is not None
    return entropy.detach(), local.grad


def test_entropy_equals_that_of_the_whole_vocabulary() -> None:
    logits, weights = problem()
    logits.requires_grad_()
    expected = torch.distributions.Categorical(logits=logits[:, :-1, :VOCAB] / TEMPERATURE).entropy()
    (expected * weights[:, 1:]).sum().backward()
    by_rank = run_on_ranks(Layout(tensor=2), entropy_on_rank)
    for entropy, _ in by_rank:
        torch.testing.assert_close(entropy[:, 1:], expected)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in by_rank], dim=-1), logits.grad)


BONUS = 0.5
"""Weight of the entropy in the loss."""


def bonus_on_rank(layout: Layout, model: TinyModel) -> tuple[float, dict[str, Tensor]]:
    """The mean entropy that the loss reports, and the gradients with the bonus."""
    engine = make_engine(layout, model, distributed=False)
    batch, microbatches, _, counts = train_arguments(layout)
    loss_fn = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0, entropy_coef=BONUS))
    metrics = engine.compute_gradients(batch, microbatches, loss_fn, counts)
    return sum(float(one["entropy"]) for one in metrics), whole_gradients(engine)


def hf_entropy(model: torch.nn.Module, temperature: float) -> Tensor:
    """The mean over the tokens in the loss, one sequence at a time."""
    batch = make_batch()
    tokens, total = batch.fields, torch.zeros(())
    columns = (tokens.token_ids.long(), tokens.loss_mask)
    for ids, mask in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        logits = model(ids[None]).logits[0, :-1] / temperature
        total = total + (torch.distributions.Categorical(logits=logits).entropy() * mask[1:]).sum()
    return total / tokens.loss_mask.sum()


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_the_bonus_is_the_entropy_that_tokens_are_sampled_with(
    layout: Layout, tiny_models: dict[str, TinyModel]
) -> None:
    """At the engine's temperature, 0.8, as the log-probabilities beside it."""
    tiny = tiny_models["qwen3_tied"]
    model = tiny.load()
    entropy = hf_entropy(model, 0.8)
    assert (entropy - hf_entropy(model, 1.0)).abs() > 0.05, "the temperature has to matter"
    (hf_loss(model) - BONUS * entropy).backward()
    by_rank = run_on_ranks(layout, bonus_on_rank, tiny)
    for found, _ in by_rank:
        assert found == pytest.approx(entropy.item(), rel=1e-4)
    actual = merged([gradients for _, gradients in by_rank])
    for name, parameter in model.named_parameters():
        error = (actual[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"
