"""Runs on ranks of the policy: their side of the checks that follow a refit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.models.adapter_check import AdapterCheck, check_adapters
from megatron_grpo.models.routed_experts import UNKNOWN, RoutedForm

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank

Logprobs = tuple[tuple[float, ...], ...]
"""Log-probabilities of all tokens but the first of each sequence."""


def score_canary(rank: PolicyRank, sequences: tuple[tuple[int, ...], ...]) -> Logprobs | None:
    """Compute log-probabilities of the canary at temperature 1; None except on output ranks.

    Every rank of the policy calls it; all replicas compute the same, since they may share experts.
    """
    lengths = [len(sequence) for sequence in sequences]
    fields = TokenFields(token_ids=torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.int32))
    if rank.routing is not None and rank.routing.replays:  # nothing is recorded, so that routers choose
        form = RoutedForm.from_shape(rank.shape)
        fields.routed_experts = torch.full((sum(lengths), form.columns), UNKNOWN, dtype=torch.int16)
    settings = rank.settings
    # vLLM computes those of a prompt without a temperature and without filters.
    rank.settings = replace(settings, temperature=1.0, token_filter=None)
    try:
        logprobs = rank.compute_logprobs(TokenBatch(lengths, fields), [list(range(len(lengths)))])
    finally:
        rank.settings = settings
    return None if logprobs is None else tuple(tuple(part[1:].tolist()) for part in logprobs.split(lengths))


def score_canary_without_adapters(rank: PolicyRank, sequences: tuple[tuple[int, ...], ...]) -> Logprobs | None:
    """Compute log-probabilities of the canary under the base model, as `score_canary`."""
    # Imported here because the driver, which names this function, does not need Megatron.
    from megatron_grpo.trainer.model.lora import adapters_off

    with adapters_off(rank.chunks):
        return score_canary(rank, sequences)


def check_rank_adapters(rank: PolicyRank) -> AdapterCheck:
    """Compare the weights that a rank publishes with what its adapted layers compute (`check_adapters`)."""
    return check_adapters(rank.gather_chunks(), rank.shape)
