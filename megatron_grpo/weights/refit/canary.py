"""The canary: a prompt whose log-probabilities are compared between policy and engines after a refit. Here are its
tokens, the largest allowed difference, the policy's log-probabilities, and which refits it follows."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.batch import TokenBatch, TokenFields
from megatron_grpo.data.routed import UNKNOWN, RoutedForm
from megatron_grpo.weights.adapter_check import AdapterCheck, check_adapters
from megatron_grpo.weights.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank

TOKENS = 32
"""Tokens of the prompt, unless sequences are shorter."""

# Largest median differences of log-probabilities, in nats, that rounding explains; docs/refit.md has measurements.
_LIMITS = {"float32": 0.01, "bfloat16": 0.5}
_QUANTISED_LIMIT = 1.5

CONVERTED = 2.0**-7
"""Largest difference, relative to the norm, of a tensor that is rounded to bfloat16 on one side: 2^-9.2 is expected."""


class Canary:
    """The checks that follow the refits of a run: the canary, and the comparison of all weights.

    Args:
        config: which checks there are, and how often.
        token_ids: the canary's prompt.
        limit: largest median difference of log-probabilities that rounding explains, in nats.
        rounding: largest difference of a tensor, relative to its norm, because engines keep another dtype.
    """

    def __init__(
        self, config: RefitConfig, token_ids: tuple[int, ...], limit: float = 0.01, rounding: float = 0.0
    ) -> None:
        self.token_ids, self.limit, self.rounding = token_ids, limit, rounding
        self._config = config
        self._next = -math.inf
        """Time (monotonic) from which on a refit is followed by the canary."""

    @staticmethod
    def of_run(config: Config, shape: ModelShape) -> Canary:
        """The checks of a run, whose policy has these sizes."""
        token_ids = canary_tokens(config.loop.seed, shape.vocab, config.policy.max_total_sequence_length)
        limit = limit_of(config) if config.refit.canary_limit is None else config.refit.canary_limit
        same = config.engine_dtype == config.policy.precision
        return Canary(config.refit, token_ids, limit, 0.0 if same else CONVERTED)

    def is_due(self) -> bool:
        """Whether the canary follows the next refit."""
        return self._config.canary and (time.monotonic() >= self._next or self._config.canary_share == 1)

    def compares_weights(self, version: int, *, new: bool) -> bool:
        """Whether all weights are compared before a version is committed; `new`: the engines have had none before."""
        period = self._config.weight_check_period
        return period is not None and (new or version % period == 0)

    def took(self, seconds: float) -> None:
        """Record the seconds by which the canary has just delayed a refit, which decide when the next one is due."""
        self._next = time.monotonic() + seconds / self._config.canary_share


def canary_tokens(seed: int, vocabulary: int, longest: int) -> tuple[int, ...]:
    """Token ids of the prompt: drawn at random, so that as many rows and experts as possible take part.

    Args:
        seed: seed of the run.
        vocabulary: number of token ids.
        longest: most tokens of a prompt and a response, which has one token here.
    """
    return tuple(random.Random(seed).choices(range(vocabulary), k=min(TOKENS, longest - 1)))


def limit_of(config: Config) -> float:
    """The largest median difference that the rounding of policy and engines explains, in nats."""
    policy, generation = config.policy, config.generation
    in_fp8 = policy.fp8.format != "off" or policy.fp8.simulate
    if in_fp8 or policy.quantization or generation.engine_args.get("quantization"):
        return _QUANTISED_LIMIT
    return max(_LIMITS[policy.precision], _LIMITS[config.engine_dtype])


def policy_logprobs(rank: PolicyRank, token_ids: tuple[int, ...]) -> tuple[float, ...] | None:
    """Log-probabilities of all tokens but the first, at temperature 1; None except on output ranks.

    Every rank of the policy calls it; all replicas compute the same, since they may share experts.
    """
    fields = TokenFields(token_ids=torch.tensor(token_ids, dtype=torch.int32))
    if rank.routing is not None and rank.routing.replays:  # nothing is recorded, so that routers choose
        form = RoutedForm.of(rank.shape)
        fields.routed_experts = torch.full((len(token_ids), form.columns), UNKNOWN, dtype=torch.int16)
    batch = TokenBatch([len(token_ids)], fields)
    settings = rank.settings
    # vLLM computes those of a prompt without a temperature and without filters.
    rank.settings = replace(settings, temperature=1.0, token_filter=None)
    try:
        found = rank.logprobs(batch, [[0]])
    finally:
        rank.settings = settings
    return None if found is None else tuple(found[1:].tolist())


def base_logprobs(rank: PolicyRank, token_ids: tuple[int, ...]) -> tuple[float, ...] | None:
    """`policy_logprobs` without the policy's adapters: those of the base model."""
    # Imported here because the driver imports this module too, and does not need Megatron.
    from megatron_grpo.trainer.model.lora import adapters_off

    with adapters_off(rank.chunks):
        return policy_logprobs(rank, token_ids)


def rank_adapters(rank: PolicyRank) -> AdapterCheck:
    """Compare the weights that a rank publishes with what its adapted layers compute (`check_adapters`)."""
    return check_adapters(rank.whole_chunks(), rank.shape)
