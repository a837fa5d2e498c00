"""Log-probabilities and entropy with the vocabulary split over tensor-parallel ranks, and the entropy in the loss."""

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo_kernels.logprob import linear_logprobs
from tests.parity.on_rank import expect_gradients
from tests.parity.policy_training import hf_loss, make_batch, make_engine, train_arguments, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge
from tests.support.tiny_models import TinyModel

TOKENS, HIDDEN, VOCAB, PADDED, TEMPERATURE = 10, 6, 11, 16, 0.7


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight, targets, and factors of both results.

    The first rank has entries far above the other's, and the second ends in padding.
    """
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    weight[: PADDED // 2] *= 5
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


def results_on_rank(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies, this rank's part of the hidden states' gradient, and that of its rows."""
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, targets, factors = problem()
    rows = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden.requires_grad_()
    start = group.rank() * len(rows)
    columns = min(len(rows), VOCAB - start)
    both = torch.stack(
        linear_logprobs(
            hidden, rows, targets, start=start, columns=columns, group=group, scale=1 / TEMPERATURE, chunk_tokens=3
        )
    )
    gradients = torch.autograd.grad((both * factors).sum(), (hidden, rows))
    return both.detach(), *gradients


def test_the_split_vocabulary_is_the_whole_one() -> None:
    hidden, weight, targets, factors = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    distribution = torch.distributions.Categorical(logits=hidden @ weight[:VOCAB].t() / TEMPERATURE)
    expected = torch.stack([distribution.log_prob(targets), distribution.entropy()])
    of_hidden, of_weight = torch.autograd.grad((expected * factors).sum(), (hidden, weight))
    by_rank = run_on_ranks(Layout(tensor=2), results_on_rank)
    for both, _, _ in by_rank:
        torch.testing.assert_close(both, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sum(part for _, part, _ in by_rank), of_hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([rows for *_, rows in by_rank]), of_weight, atol=1e-4, rtol=1e-4)


BONUS = 0.5
"""Weight of the entropy in the loss."""


def bonus_on_rank(layout: Layout, model: TinyModel) -> tuple[float, dict[str, Tensor]]:
    """The mean entropy that the loss reports, and the gradients with the bonus."""
    engine = make_engine(layout, model, distributed=False)
    batch, microbatches, _, counts = train_arguments(layout)
    loss_fn = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0, entropy_coef=BONUS))
    metrics = engine.compute_gradients(batch, microbatches, loss_fn, counts)
    return sum(float(metric["entropy"]) for metric in metrics), whole_gradients(engine)


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
    for value, _ in by_rank:
        assert value == pytest.approx(entropy.item(), rel=1e-4)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    expect_gradients(merge([gradients for _, gradients in by_rank]), expected)
