"""Suspects of complete models: weights, or cached keys and values, of another version; adapters that are not merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from megatron_grpo.verification.doctor.evidence import Rollout
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect, fit
from megatron_grpo.verification.oracle import Oracle

REFIT = "refit.mode=broadcast (another transport, with vLLM's own loaders), and report the transport that failed"
RECENT_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Numbers of a prompt's last tokens that are computed anew although the others are cached."""
BLOCK = 16
"""Tokens of a block of vLLM's prefix cache, which keeps full blocks only."""
FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Factors of adapters that are tried before the best one is refined."""


Load = Callable[[int], Oracle]
"""Loads the model of a version; candidates call it when they predict, so that few models are in memory at once."""


def iterate_versions(
    version: int, versions: Sequence[int], load: Load, has_adapters: bool, side: Side
) -> Iterator[Candidate]:
    """Yield all weights of another version.

    Args:
        version: the version that the record names.
        versions: other versions to try.
        load: loads the model of a version.
        has_adapters: whether the run trains adapters, so that version 0 is the model without them.
        side: the record.
    """
    for number in versions:
        behind = version - number
        steps = f"{abs(behind)} version{'s' * (abs(behind) > 1)} {'behind' if behind > 0 else 'ahead'}"
        text = f"has the weights of version {number}, {steps}, and says version {version}"
        suspect = Suspect("version_behind", "staleness", text, REFIT)
        if has_adapters and number == 0:
            text = "has no adapters: its weights are those of the base model"
            suspect = Suspect("adapters_missing", "weights", text, "policy.lora; " + REFIT)
        yield suspect, partial(_of_version, load, number)


def _of_version(load: Load, number: int, side: Side) -> Tensor:
    return side.predict(oracle=load(number))


def iterate_adapters(load: Load, side: Side) -> Iterator[Candidate]:
    """Yield adapters merged with another factor; version 0 is without adapters."""
    ours, bare = side.oracle.list_tensors(), load(0).list_tensors()

    def scale_adapters(factor: float) -> AbstractContextManager[None]:
        return side.oracle.replaced(
            {
                name: bare[name] + factor * (ours[name] - bare[name])
                for name in ours
                if ours[name].shape == bare[name].shape
            }
        )

    def predict(factor: float, part: Side) -> Tensor:
        with scale_adapters(factor):
            return part.predict()

    best = fit(side, FACTORS, lambda factors: (predict(factor, side) for factor in factors))
    text = f"has merged the adapters times {best:.4g}"
    yield (
        Suspect("adapters_scaled", "weights", text, "policy.lora.alpha and policy.lora.rank", assumes=2),
        partial(predict, best),
    )


def iterate_stale_caches(version: int, versions: Sequence[int], load: Load, side: Side) -> Iterator[Candidate]:
    """Yield keys and values that another version left in the cache.

    They are of prompts, or of responses that a refit interrupted. Arguments are those of `iterate_versions`.
    """
    interrupted = any(len(rollout.row["spans"]) > 1 for rollout in side.rollouts)
    key = "generation.engine.enable_prefix_caching=false"
    refit_key = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
    for number in versions:
        text = f"has the keys and values of prompts cached from version {number}"
        suspect = Suspect("stale_cache", "staleness", text, key)
        yield suspect, partial(_predict_with_cache, load, number, _cut_at_blocks)
        for recent_tokens in RECENT_TOKENS:
            suspect = Suspect("stale_cache", "staleness", f"{text}, but for the last {recent_tokens} tokens", key)
            yield suspect, partial(_predict_with_cache, load, number, partial(_cut_before_last, recent_tokens))
        if interrupted:
            text = f"goes on with the keys and values of version {number} after a refit"
            suspect = Suspect("stale_cache", "staleness", text, refit_key)
            yield suspect, partial(_predict_with_cache, load, number, partial(_cut_at_refit, version))


Cut = Callable[[Rollout], int]
"""Number of a rollout's first tokens whose keys and values are of another version."""


def _predict_with_cache(load: Load, number: int, cut: Cut, side: Side) -> Tensor:
    # A token is predicted by the hidden state before it, which has to be computed anew by the newer model.
    firsts = [int(tokens.chosen[0]) if len(tokens.chosen) else 0 for tokens in side.tokens]
    cuts = [min(cut(rollout), max(0, first - 1)) for rollout, first in zip(side.rollouts, firsts, strict=True)]
    return side.oracle.compute_logprobs_with_cache(load(number), side.tokens, cuts, side.law)


def _cut_at_blocks(rollout: Rollout) -> int:
    # vLLM computes at least the prompt's last token anew, even if its block is cached.
    return max(0, int(rollout.row["spans"][0][0]) - 1) // BLOCK * BLOCK


def _cut_before_last(recent_tokens: int, rollout: Rollout) -> int:
    return max(0, max(1, int(rollout.row["spans"][0][0])) - recent_tokens)


def _cut_at_refit(version: int, rollout: Rollout) -> int:
    spans = rollout.row["spans"]
    later = [int(start) for start, _, number in spans[1:] if number == version]
    return max(0, later[0] - 1) if later and spans[0][2] != version else 0
