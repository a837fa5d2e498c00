"""A step of a policy whose layers round their operands, on ranks and in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import LossConfig, ReferenceConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.parity.on_rank import TEMPERATURE, expect_gradients
from tests.parity.policy_training import make_engine, whole_gradients
from tests.parity.ranks import Layout
from tests.parity.training import merged, step_counts
from tests.support.tiny_models import VOCAB, TinyModel, logprobs_of_logits

LENGTHS = [6, 8, 4]
"""Even, so that sequence parallelism adds no padding, which would take part in a tensor's largest value."""
Measured = tuple[Tensor | None, Tensor | None, dict[str, Tensor]]


def make_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(4)
    total, starts = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]
    mask = torch.ones(total)
    mask[starts] = 0
    tokens = TokenFields(
        token_ids=torch.randint(0, VOCAB, (total,), generator=generator).int(),
        loss_mask=mask,
        advantages=torch.randn(total, generator=generator),
        generation_logprobs=-torch.rand(total, generator=generator),
    )
    return TokenBatch(LENGTHS, tokens)


def measure_on_rank(
    layout: Layout, model: TinyModel, settings: dict[str, Any], has_reference: bool = False
) -> Measured:
    """Log-probabilities of all tokens under policy and reference, on the output rank, and gradients."""
    reference = ReferenceConfig() if has_reference else None
    rank = make_engine(layout, model, distributed=False, reference=reference, **settings)
    microbatches = [[index] for index in range(len(LENGTHS))]
    tokens = TokenBatch(LENGTHS, TokenFields(token_ids=make_batch().fields.token_ids))
    logprobs = rank.compute_logprobs(tokens, microbatches)
    of_reference = rank.compute_reference_logprobs(tokens, microbatches) if has_reference else None
    loss = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0))
    rank.compute_gradients(make_batch(), microbatches, loss, step_counts(make_batch()))
    return logprobs, of_reference, whole_gradients(rank)


def measure_in_transformers(model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities and the gradients of a model of transformers."""
    tokens, logprobs_of_all, loss = make_batch().fields, [], torch.zeros(())
    columns = (tokens.token_ids.long(), tokens.loss_mask, tokens.advantages)
    for ids, mask, advantages in zip(*(column.split(LENGTHS) for column in columns), strict=True):
        logprobs = logprobs_of_logits(model(ids[None]).logits / TEMPERATURE, ids[None])[0]
        logprobs_of_all.append(logprobs.detach())
        loss = loss - (logprobs * advantages * mask).sum()
    (loss / tokens.loss_mask.sum()).backward()
    return torch.cat(logprobs_of_all), {name: parameter.grad for name, parameter in model.named_parameters()}


def expect_equal(by_rank: list[Measured], logprobs: Tensor, gradients: dict[str, Tensor]) -> None:
    (reported,) = [found for found, _, _ in by_rank if found is not None]
    torch.testing.assert_close(reported, logprobs, atol=2e-5 / TEMPERATURE, rtol=0)
    expect_gradients(merged([found for _, _, found in by_rank]), gradients)
