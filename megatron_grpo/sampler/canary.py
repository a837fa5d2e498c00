"""The canary of a refit: a fixed prompt, by whose log-probabilities an engine is compared with the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_grpo.config.errors import CanaryError

ARGUMENTS = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
"""Sampling parameters of the request. With prompt_logprobs vLLM computes every token of the prompt, whatever its prefix
cache has, and returns the log-probability of each, before temperature and filters."""

NEARER = 2.0
"""An engine without the policy's adapters is at least this many times nearer to the base model than to the policy."""
ROUNDING_SHARE = 0.01
"""Share of the limit below which a difference is rounding, whatever it is nearer to."""


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """The prompt of one refit, with the policy's log-probabilities under the weights that the refit has sent."""

    version: int
    token_ids: tuple[int, ...]
    expected: tuple[float, ...]
    """Log-probability of every token but the first, at temperature 1."""
    limit: float
    """Largest median difference, in nats, that rounding explains."""
    base: tuple[float, ...] | None = None
    """Log-probabilities without the policy's adapters; None: it has none."""

    def require(self, found: Sequence[float]) -> float:
        """Compare an engine's log-probabilities, of every token but the first, with the policy's.

        Returns:
            Median of the absolute differences, in nats.

        Raises:
            CanaryError: the median is beyond the limit, or a number is not finite; or the engine computes what the
                policy does without its adapters.
        """
        error = _median_difference(self.expected, found)
        if error > self.limit:
            raise CanaryError(
                f"with version {self.version} of the weights its log-probabilities of the canary differ from the "
                f"policy's by {error:.3g} (median), more than {self.limit:g} (refit.canary_limit)"
            )
        # The limit cannot tell a policy of few steps from its base model. How far the engine is from the one and from
        # the other can, as soon as the adapters move log-probabilities by about twice the rounding.
        from_base = math.inf if self.base is None else _median_difference(self.base, found)
        if error > max(NEARER * from_base, ROUNDING_SHARE * self.limit):
            raise CanaryError(
                f"with version {self.version} of the weights its log-probabilities of the canary are the base model's: "
                f"they differ from those by {from_base:.3g} and from the policy's by {error:.3g} (medians), so it has "
                "no adapters"
            )
        return error


def _median_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """Median of the absolute differences; infinite if one is not finite."""
    # The median, because in bfloat16 a near tie sends some token to another expert, whose difference is large.
    differences = [abs(one - other) for one, other in zip(expected, found, strict=True)]
    return median(differences) if all(map(math.isfinite, differences)) else math.inf
