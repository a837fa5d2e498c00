"""The tokens that every layout is given, and what transformers makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_grpo.config.schema import LossConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given
from megatron_grpo.losses.interface import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn


@dataclass(frozen=True, slots=True)
class Truth:
    """What transformers computes, in float32 on one process."""

    logprobs: Tensor
    """[tokens], float32: of every token; 0 at the first of a sequence."""
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """Both by the names of transformers, in full shape."""


def make_batch(vocab: int, sequences: int, longest: int, seed: int) -> TokenBatch:
    """Random sequences of different lengths, with random masks, advantages and sampling log-probabilities."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, max(longest, 2) + 1, (sequences,), generator=draw)
    lengths[0] = longest
    total = int(lengths.sum())
    mask = (torch.rand(total, generator=draw) < 0.7).float()
    starts = (lengths.cumsum(0) - lengths).tolist()
    mask[starts] = 0.0  # nothing comes before a first token
    mask[starts[0] + 1] = 1.0
    fields = TokenFields(
        token_ids=torch.randint(0, vocab, (total,), generator=draw).int(),
        loss_mask=mask,
        advantages=torch.randn(total, generator=draw),
        generation_logprobs=-torch.rand(total, generator=draw),
    )
    return TokenBatch(lengths.tolist(), fields)


def make_loss() -> ClippedPGLossFn:
    """The policy gradient as the mean of advantage times log-probability, whose value moves with the weights."""
    return ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0, disable_ppo_ratio=True))


def counts_of(batch: TokenBatch) -> GlobalCounts:
    """What the loss of a step on the whole batch is divided by."""
    masks = given(batch.fields.loss_mask).split(batch.lengths)
    return GlobalCounts(
        tokens=float(sum(mask.sum() for mask in masks)),
        sequences=float(sum(bool(mask.any()) for mask in masks)),
        all_sequences=float(len(masks)),
    )


def solve(folder: Path, batch: TokenBatch) -> Truth:
    """What transformers says of a batch, one sequence at a time: no padding, no packing, no layout."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fields, logprobs = batch.fields, []
    total = torch.zeros(())
    columns = (given(fields.token_ids).long(), given(fields.loss_mask), given(fields.advantages))
    for ids, mask, advantages in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        logits = model(ids[None]).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - (own * advantages[1:] * mask[1:]).sum()
        logprobs.append(torch.nn.functional.pad(own.detach(), (1, 0)))
    (total / given(fields.loss_mask).sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Truth(torch.cat(logprobs), gradients, weights)
