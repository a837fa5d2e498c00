"""The canary of a refit: a fixed prompt, by whose log-probabilities an engine is compared with the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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
    """Largest mean difference, in nats, that rounding explains."""

    def require(self, found: Sequence[float]) -> float:
        """Compare an engine's log-probabilities, of every token but the first, with the policy's.

        Returns:
            Mean of the absolute differences, in nats.

        Raises:
            CanaryError: the mean is beyond the limit, or not a number.
        """
        error = fmean(abs(one - other) for one, other in zip(self.expected, found, strict=True))
        if not error <= self.limit:
            raise CanaryError(
                f"with version {self.version} of the weights its log-probabilities of the canary differ from the "
                f"policy's by {error:.3g} on average, more than {self.limit:g} (refit.canary_limit)"
            )
        return error
