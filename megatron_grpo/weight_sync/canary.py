"""The canary: sequences whose log-probabilities are compared between policy and engines after a refit. Here are their
tokens, the largest allowed difference, the policy's log-probabilities, and which refits it follows."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.adapter_check import AdapterCheck, check_adapters
from megatron_grpo.models.routed_experts import UNKNOWN, RoutedForm
from megatron_grpo.models.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank

LENGTHS = (32, 9, 20, 13)
"""Tokens of each sequence, unless sequences of the run are shorter. They differ, so that a position or a boundary that
is taken from a neighbour shows, and each has enough tokens for a median."""


FIRST_CANARIES = 4
"""Canaries of a start that are not kept to their share of the time: the first weights and those of three steps, since a
refit that goes wrong mostly does so from the first changed weights on."""
FIRST_COMPARISONS = 2
"""Comparisons of all weights at a start: of the first weights, which engines may have loaded themselves, and of the
first that a step has changed."""


@dataclass(frozen=True, slots=True)
class CanaryBounds:
    """Bounds of the largest difference that rounding explains, in nats; docs/refit.md has the measurements."""

    first: float
    """Limit until a canary of this run has measured the noise, and the largest limit afterwards."""
    floor: float
    """Smallest limit: noise changes with the weights."""
    margin: float
    """Limit as a multiple of the measured noise."""

    def limit(self, noise: float | None) -> float:
        """The limit after canaries that differed by `noise` although the weights were right; None: there was none."""
        return self.first if noise is None else min(self.first, max(self.floor, self.margin * noise))


_BOUNDS = {
    "float32": CanaryBounds(1e-3, 1e-4, margin=20.0),
    "tf32": CanaryBounds(0.01, 1e-4, margin=20.0),
    "bfloat16": CanaryBounds(0.5, 0.1, margin=8.0),
    "8 bits": CanaryBounds(1.5, 0.5, margin=5.0),
}

ROUNDING_SHARE = 0.01
"""Share of the first limit below which a difference is rounding, whatever it is nearer to."""

CONVERTED = 2.0**-7
"""Largest difference, relative to the norm, of a tensor that is rounded to bfloat16 on one side: 2^-9.2 is expected."""


class Canary:
    """The checks that follow the refits of a run: the canary, and the comparison of all weights.

    Args:
        config: which checks there are, and how often.
        sequences: token ids of the canary's sequences.
        bounds: the differences of log-probabilities that rounding explains.
        rounding: largest difference of a tensor, relative to its norm, because engines keep another dtype.
    """

    def __init__(
        self,
        config: RefitConfig,
        sequences: tuple[tuple[int, ...], ...],
        bounds: CanaryBounds = _BOUNDS["tf32"],
        rounding: float = 0.0,
    ) -> None:
        self.sequences, self.rounding = sequences, rounding
        self._config, self._bounds = config, bounds
        self._noise: float | None = None
        """Largest difference of a canary after a refit whose weights were right; None: none was measured."""
        self._next = -math.inf
        """Time (monotonic) from which on a refit is followed by the canary."""
        self._first_canaries, self._due_comparisons = FIRST_CANARIES, FIRST_COMPARISONS
        """Numbers of checks that follow the next refits, whatever time has passed."""

    @staticmethod
    def of_run(config: Config, shape: ModelShape) -> Canary:
        """The checks of a run, whose policy has these sizes."""
        sequences = canary_sequences(config.training_loop.seed, shape.vocab, config.policy.max_total_sequence_length)
        same = config.engine_dtype == config.policy.precision
        return Canary(config.refit, sequences, bounds_of(config), 0.0 if same else CONVERTED)

    @property
    def limit(self) -> float:
        """Largest difference of log-probabilities with which an engine serves, in nats."""
        fixed = self._config.canary_limit
        return self._bounds.limit(self._noise) if fixed is None else fixed

    @property
    def adapter_rounding(self) -> float:
        """Difference of log-probabilities, in nats, below which an engine is not taken for one without adapters."""
        return ROUNDING_SHARE * (self._config.canary_limit or self._bounds.first)

    def is_due(self) -> bool:
        """Whether the canary follows the next refit."""
        has_time = time.monotonic() >= self._next or self._config.canary_share == 1
        return self._config.canary and (has_time or self._first_canaries > 0)

    def compares_weights(self, version: int, *, new: bool) -> bool:
        """Whether all weights are compared before a version is committed; `new`: the engines have had none before."""
        period = self._config.weight_check_period
        return period is not None and (new or self._due_comparisons > 0 or version % period == 0)

    def require_checks(self) -> None:
        """Let both checks follow the next refit, unless the configuration has switched them off."""
        self._next, self._due_comparisons = -math.inf, max(1, self._due_comparisons)

    def compared(self) -> None:
        """Record that all weights have just been compared."""
        self._due_comparisons = max(0, self._due_comparisons - 1)

    def took(self, seconds: float) -> None:
        """Record the seconds by which the canary has just delayed a refit, which decide when the next one is due."""
        self._next = time.monotonic() + seconds / self._config.canary_share
        self._first_canaries = max(0, self._first_canaries - 1)

    def measure(self, error: float) -> None:
        """Record the difference of an admitted canary after a refit whose weights are known to be right."""
        self._noise = max(error, self._noise or 0.0)


def canary_sequences(seed: int, vocabulary: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Draw the token ids of the canary at random, so that as many rows and experts as possible take part.

    Args:
        seed: seed of the run.
        vocabulary: number of token ids.
        longest: most tokens of a prompt and a response, which has one token here.

    Returns:
        Sequences of several lengths (`LENGTHS`).
    """
    draw = random.Random(seed)
    return tuple(tuple(draw.choices(range(vocabulary), k=min(length, longest - 1))) for length in LENGTHS)


def bounds_of(config: Config) -> CanaryBounds:
    """The differences that the rounding of policy and engines explains."""
    return _BOUNDS[config.coarsest_precision]


Logprobs = tuple[tuple[float, ...], ...]
"""Log-probabilities of all tokens but the first of each sequence."""


def policy_logprobs(rank: PolicyRank, sequences: tuple[tuple[int, ...], ...]) -> Logprobs | None:
    """Log-probabilities of the canary at temperature 1, in one microbatch; None except on output ranks.

    Every rank of the policy calls it; all replicas compute the same, since they may share experts.
    """
    lengths = [len(sequence) for sequence in sequences]
    fields = TokenFields(token_ids=torch.tensor([token for one in sequences for token in one], dtype=torch.int32))
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


def base_logprobs(rank: PolicyRank, sequences: tuple[tuple[int, ...], ...]) -> Logprobs | None:
    """`policy_logprobs` without the policy's adapters: those of the base model."""
    # Imported here because the driver imports this module too, and does not need Megatron.
    from megatron_grpo.trainer.model.lora import adapters_off

    with adapters_off(rank.chunks):
        return policy_logprobs(rank, sequences)


def rank_adapters(rank: PolicyRank) -> AdapterCheck:
    """Compare the weights that a rank publishes with what its adapted layers compute (`check_adapters`)."""
    return check_adapters(rank.gather_chunks(), rank.shape)
