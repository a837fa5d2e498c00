"""The batch that every layout computes, and the results of transformers for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import LossConfig, MoeConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.weights.families import shape_of_folder
from megatron_grpo.weights.shape import ExpertShape

MOE = MoeConfig(aux_loss_coeff=0.05, z_loss_coeff=0.01)
"""Settings of the experts' balancing losses, which are part of every layout's gradient."""


@dataclass(frozen=True, slots=True)
class Truth:
    """transformers' results, in float32 in one process."""

    logprobs: Tensor
    """[tokens], float32: log-probability of every token; 0 at the first token of a sequence."""
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """Gradients and weights have the names and shapes of the model's files; in memory transformers stacks experts."""


def make_batch(vocab: int, sequences: int, longest: int, seed: int) -> TokenBatch:
    """Random sequences of different lengths, with random masks, advantages and sampling log-probabilities."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, max(longest, 2) + 1, (sequences,), generator=draw)
    lengths[0] = longest
    total = int(lengths.sum())
    mask = (torch.rand(total, generator=draw) < 0.7).float()
    starts = (lengths.cumsum(0) - lengths).tolist()
    mask[starts] = 0.0  # a first token has no log-probability
    mask[starts[0] + 1] = 1.0
    fields = TokenFields(
        token_ids=torch.randint(0, vocab, (total,), generator=draw).int(),
        loss_mask=mask,
        advantages=torch.randn(total, generator=draw),
        generation_logprobs=-torch.rand(total, generator=draw),
    )
    return TokenBatch(lengths.tolist(), fields)


def make_loss() -> ClippedPGLossFn:
    """The mean of advantage times log-probability: a loss whose value depends on the weights too."""
    return ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0, disable_ppo_ratio=True))


def counts_of(batch: TokenBatch) -> GlobalCounts:
    """The denominators of a step on the whole batch."""
    masks = given(batch.fields.loss_mask).split(batch.lengths)
    return GlobalCounts(
        tokens=float(sum(mask.sum() for mask in masks)),
        sequences=float(sum(bool(mask.any()) for mask in masks)),
        all_sequences=float(len(masks)),
    )


def solve(folder: Path, batch: TokenBatch) -> Truth:
    """transformers' results for a batch, one sequence at a time: no padding, no packing, no layout.

    Raises:
        RunError: transformers cannot load or compute the model.
    """
    try:
        return _solved(folder, batch)
    except Exception as error:  # a model's own code may raise anything
        raise RunError(f"transformers cannot compute {folder}: {type(error).__name__}: {error}") from error


def _solved(folder: Path, batch: TokenBatch) -> Truth:
    # Grouped products of experts need sizes that are multiples of 16 bytes; eager ones take any.
    kind = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **kind).eval()
    # torch gives the row of this token no gradient. Training has no such token: padding is never computed.
    model.get_input_embeddings().padding_idx = None
    experts = shape_of_folder(folder).experts
    asked = {} if experts is None else {"output_router_logits": True}
    stored = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    in_memory = {name: value.detach().clone() for name, value in (*model.named_parameters(), *buffers)}
    weights = revert_weight_conversion(model, in_memory)
    fields, logprobs = batch.fields, []
    total = torch.zeros(())
    columns = (given(fields.token_ids).long(), given(fields.loss_mask), given(fields.advantages))
    for ids, mask, advantages in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        output = model(ids[None], **asked)
        own = output.logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - (own * advantages[1:] * mask[1:]).sum() / given(fields.loss_mask).sum()
        if experts is not None:
            total = total + sum(router_losses(one, experts) for one in output.router_logits) / len(batch)
        logprobs.append(torch.nn.functional.pad(own.detach(), (1, 0)))
    total.backward()
    of_trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Truth(torch.cat(logprobs), revert_weight_conversion(model, of_trained), weights)


def router_losses(logits: Tensor, experts: ExpertShape) -> Tensor:
    """The losses of `MOE` for one layer and one sequence: logits [tokens, experts], float32, to [].

    For softmax scores the balancing loss is transformers' own, which counts a token once for each of its experts.
    """
    if experts.score == "softmax":
        level = load_balancing_loss_func((logits,), experts.count, experts.top_k) / experts.top_k
    else:  # DeepSeek-V3 (2024), equations 17 to 20
        scores = logits.sigmoid() / logits.sigmoid().sum(dim=1, keepdim=True)
        chosen = torch.nn.functional.one_hot(scores.topk(experts.top_k, dim=1).indices, experts.count).sum(dim=1)
        level = (chosen.float().mean(dim=0) * experts.count / experts.top_k * scores.mean(dim=0)).sum()
    squares = logits.logsumexp(dim=1).square().mean()
    return MOE.aux_loss_coeff * level + MOE.z_loss_coeff * squares
