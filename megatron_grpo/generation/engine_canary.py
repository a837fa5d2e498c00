"""The canary of a refit: fixed sequences whose log-probabilities an engine and the policy compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, NoReturn

from megatron_grpo.config.errors import CanaryError

# With prompt_logprobs vLLM computes every token of the prompt, whatever its prefix cache has, and returns the
# log-probability of each, before temperature and filters.
SAMPLING_ARGUMENTS = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
BASE_RATIO = 2.0  # an engine without adapters is this many times nearer to the base model than to the policy


class CanaryResult(NamedTuple):
    """Distance of an engine from the policy, in nats.

    NaN: vLLM did not compute the canary.
    """

    error: float  # largest of the sequences' medians of absolute differences
    largest: float = math.nan  # difference of a single token
    is_suspect: bool = False
    """Tokens of one sequence are beyond their limit, by a near tie of experts or by a fault: the next canary tells."""


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """The sequences of one refit, and the policy's log-probabilities.

    The policy computes them in one microbatch, and an engine in one batch, so that leaks between neighbours show.
    """

    version: int
    sequences: tuple[tuple[int, ...], ...]  # token ids of each sequence; no two are equally long
    expected: tuple[tuple[float, ...], ...]
    """Log-probability of every token but the first of each sequence, at temperature 1."""
    limit: float  # largest difference, in nats, that rounding explains (`require_agreement`)
    token_limit: float = math.inf  # largest difference of a single token, in nats, that rounding explains
    spares_sequence: bool = False  # tokens of one sequence may be beyond `token_limit`
    rounding: float = 0.0  # difference, in nats, that does not show missing adapters
    base: tuple[tuple[float, ...], ...] | None = None
    """Log-probabilities without the policy's adapters; None: it has none."""

    def require_agreement(self, actual: Sequence[Sequence[float]]) -> CanaryResult:
        """Compare an engine's log-probabilities of every token but the first with the policy's.

        Raises CanaryError if the median of a sequence is beyond the limit or not finite, if a token is beyond the limit
        of tokens, or if the engine computes as the policy does without its adapters.
        """
        medians = _compute_medians(self.expected, actual)
        error = max(medians)
        if error > self.limit:
            lengths = [len(sequence) for sequence in self.sequences]
            pairs = zip(medians, lengths, strict=True)
            text = ", ".join(f"{difference:.3g} ({tokens} tokens)" for difference, tokens in pairs)
            raise CanaryError(
                f"with version {self.version} of the weights its log-probabilities of the canary differ from the "
                f"policy's by {error:.3g} (median), more than {self.limit:.3g} (refit.canary_limit); sequence by "
                f"sequence, in the order in which they are packed: {text}"
            )
        beyond = self._find_tokens(actual)
        if len(beyond) > self.spares_sequence:
            self._refuse_tokens(beyond)
        # A policy of few steps is within the limit of its base model. Comparing the engine's distances from the two
        # tells them apart as soon as the adapters move log-probabilities by about twice the rounding.
        from_base = math.inf if self.base is None else max(_compute_medians(self.base, actual))
        if error > max(BASE_RATIO * from_base, self.rounding):
            raise CanaryError(
                f"with version {self.version} of the weights its log-probabilities of the canary are the base model's: "
                f"they differ from those by {from_base:.3g} and from the policy's by {error:.3g} (medians), so it has "
                "no adapters"
            )
        largest = max(max(_compute_differences(*rows)) for rows in zip(self.expected, actual, strict=True))
        return CanaryResult(error, largest, is_suspect=bool(beyond))

    def _find_tokens(self, actual: Sequence[Sequence[float]]) -> dict[int, dict[int, float]]:
        """Find the tokens beyond their limit: differences by sequence and token."""
        beyond = {}
        for number, rows in enumerate(zip(self.expected, actual, strict=True)):
            differences = enumerate(_compute_differences(*rows), 1)
            if tokens := {token: error for token, error in differences if error > self.token_limit}:
                beyond[number] = tokens
        return beyond

    def _refuse_tokens(self, beyond: Mapping[int, Mapping[int, float]]) -> NoReturn:
        texts = []
        for number, tokens in beyond.items():
            ids, first = self.sequences[number], min(tokens)
            example = f"from token {first} (id {ids[first]}, behind id {ids[first - 1]})"
            texts.append(f"{len(tokens)} of {len(ids)} tokens, {example}, by up to {max(tokens.values()):.3g}")
        text = ", ".join(texts)
        raise CanaryError(
            f"with version {self.version} of the weights the medians agree, but log-probabilities of single tokens of "
            f"the canary differ from the policy's by more than {self.token_limit:.3g}: {text}. Such a fault concerns a "
            "part of the model that only these tokens use, such as a row of the embedding, a head or an expert"
        )


def _compute_differences(expected: Sequence[float], actual: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(expected, actual, strict=True)]


def _compute_medians(expected: Sequence[Sequence[float]], actual: Sequence[Sequence[float]]) -> list[float]:
    # The median, because in bfloat16 a near tie sends some token to another expert, whose difference is large. One a
    # sequence, because a fault of packing leaves the first sequence of a pack as it is.
    medians = []
    for expected_logprobs, logprobs in zip(expected, actual, strict=True):
        differences = _compute_differences(expected_logprobs, logprobs)
        medians.append(median(differences) if all(map(math.isfinite, differences)) else math.inf)
    return medians
