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


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """The prompt of one refit, with the policy's log-probabilities under the weights that the refit has sent."""

    version: int
    token_ids: tuple[int, ...]
    expected: tuple[float, ...]
    """Log-probability of every token but the first, at temperature 1."""
    limit: float
    """Largest median difference, in nats, that rounding explains."""

    def require(self, found: Sequence[float]) -> float:
        """Compare an engine's log-probabilities, of every token but the first, with the policy's.

        Returns:
            Median of the absolute differences, in nats.

        Raises:
            CanaryError: the median is beyond the limit, or a number is not finite.
        """
        # The median, because in bfloat16 a near tie sends some token to another expert, whose difference is large.
        differences = [abs(one - other) for one, other in zip(self.expected, found, strict=True)]
        error = median(differences) if all(map(math.isfinite, differences)) else math.inf
        if error > self.limit:
            raise CanaryError(
                f"with version {self.version} of the weights its log-probabilities of the canary differ from the "
                f"policy's by {error:.3g} (median), more than {self.limit:g} (refit.canary_limit)"
            )
        return error
