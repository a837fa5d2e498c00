"""The canary: sequences whose log-probabilities are compared between policy and engines after a refit.

This module has their tokens, the largest allowed difference, and which refits are checked.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape

# Tokens of each sequence, unless sequences of the run are shorter. They differ, so that a position or a boundary that
# is taken from a neighbour shows, and each has enough tokens for a median.
LENGTHS = (32, 9, 20, 13)

# Canaries of a start that are not limited to their share of the time: the first weights and those of three steps, since
# a refit that goes wrong mostly does so from the first changed weights on.
FIRST_CANARIES = 4
# Comparisons of all weights at a start: of the first weights, which engines may have loaded themselves, and of the
# first that a step has changed.
FIRST_COMPARISONS = 2


@dataclass(frozen=True, slots=True)
class CanaryBounds:
    """Bounds of the difference that rounding explains, in nats (docs/refit.md)."""

    first: float
    """Limit until a canary of this run has measured the noise, and the largest limit afterwards."""
    floor: float
    """Smallest limit: noise changes with the weights."""
    margin: float
    """Limit as a multiple of the measured noise."""

    def compute_limit(self, noise: float | None) -> float:
        """Compute the limit from the noise that was measured, if any."""
        return self.first if noise is None else min(self.first, max(self.floor, self.margin * noise))


_BOUNDS = {
    "float32": CanaryBounds(1e-3, 1e-4, margin=20.0),
    "tf32": CanaryBounds(0.01, 1e-4, margin=20.0),
    "bfloat16": CanaryBounds(0.5, 0.1, margin=8.0),
    "8 bits": CanaryBounds(1.5, 0.5, margin=5.0),
}

# Share of the first limit below which a difference is rounding, whatever it is nearer to.
ROUNDING_SHARE = 0.01

# Largest difference, relative to the norm, of a tensor that is rounded to bfloat16 on one side: 2^-9.2 is expected.
_CONVERSION_ROUNDING = 2.0**-7


class Canary:
    """Decides which checks follow a refit: the canary, and the comparison of all weights.

    `rounding`: difference of a tensor, relative to its norm, that another dtype of engines explains.
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
        self._next_at = -math.inf
        """Time (monotonic) from which on a refit is followed by the canary."""
        self._first_canaries, self._due_comparisons = FIRST_CANARIES, FIRST_COMPARISONS
        """Numbers of checks that follow the next refits, whatever time has passed."""

    @staticmethod
    def from_config(config: Config, shape: ModelShape) -> Canary:
        """The checks of a run whose policy has these sizes."""
        sequences = draw_canary(config.training_loop.seed, shape.vocab, config.policy.max_total_sequence_length)
        is_converted = config.engine_dtype != config.policy.precision
        return Canary(config.refit, sequences, choose_bounds(config), _CONVERSION_ROUNDING if is_converted else 0.0)

    @property
    def limit(self) -> float:
        """Largest difference of log-probabilities with which an engine serves, in nats."""
        fixed = self._config.canary_limit
        return self._bounds.compute_limit(self._noise) if fixed is None else fixed

    @property
    def adapter_rounding(self) -> float:
        """Difference in nats below which an engine is not taken for one without adapters."""
        return ROUNDING_SHARE * (self._config.canary_limit or self._bounds.first)

    def is_due(self) -> bool:
        """Whether the canary follows the next refit."""
        has_time = time.monotonic() >= self._next_at or self._config.canary_share == 1
        return self._config.canary and (has_time or self._first_canaries > 0)

    def should_compare_weights(self, version: int, *, new: bool) -> bool:
        """Whether weights are compared; `new`: engines have had none before."""
        period = self._config.weight_check_period
        return period is not None and (new or self._due_comparisons > 0 or version % period == 0)

    def require_checks(self) -> None:
        """Make both checks due, unless the configuration has switched them off."""
        self._next_at, self._due_comparisons = -math.inf, max(1, self._due_comparisons)

    def record_comparison(self) -> None:
        self._due_comparisons = max(0, self._due_comparisons - 1)

    def record_time(self, seconds: float) -> None:
        """Record how long the canary took, which decides when it is due again."""
        self._next_at = time.monotonic() + seconds / self._config.canary_share
        self._first_canaries = max(0, self._first_canaries - 1)

    def record_noise(self, error: float) -> None:
        """Record a passed canary's difference, where weights are known to be right."""
        self._noise = max(error, self._noise or 0.0)


def draw_canary(seed: int, vocabulary: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Draw random token ids, so that many rows and experts take part.

    `longest`: most tokens of a prompt and a response, which has one token here.
    """
    draw = random.Random(seed)
    return tuple(tuple(draw.choices(range(vocabulary), k=min(length, longest - 1))) for length in LENGTHS)


def choose_bounds(config: Config) -> CanaryBounds:
    """Choose the differences that the rounding of policy and engines explains."""
    return _BOUNDS[config.coarsest_precision]
