"""Explanations by whole models: weights or cached keys and values of another version, adapters that are not merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect, fit
from megatron_grpo.verification.oracle import Oracle

REFIT = "refit.mode=broadcast (another transport, with vLLM's own loaders), and report the transport that failed"
RECENT_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Last tokens of a prompt that are computed anew although the others are cached."""
BLOCK = 16
"""Tokens of a block of vLLM's prefix cache, which keeps whole blocks only."""
FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Factors of adapters that are tried before the best one is refined."""


Load = Callable[[int], Oracle]
"""From a version to its model, which is loaded when it is needed, so that few models are in memory at once."""


def iterate_versions(
    version: int, versions: Sequence[int], load: Load, has_adapters: bool, side: Side
) -> Iterator[Candidate]:
    """All weights of another version.

    Args:
        version: the version that the record names.
        others: the other versions.
        load: gives the model of a version.
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
    """Yield adapters that are merged with another factor.

    `load` gives version 0, the model without adapters.
    """
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
    """Yield keys and values that another version has left.

    They are of prompts, or of responses that a refit interrupted. Arguments are those of `iterate_versions`.
    """
    interrupted = any(len(_list_starts(side, number)) > 1 for number in range(len(side.rollouts)))
    key = "generation.engine.enable_prefix_caching=false"
    again = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
    for number in versions:
        text = f"has the keys and values of prompts cached from version {number}"
        suspect = Suspect("stale_cache", "staleness", text, key)
        yield suspect, partial(_predict_behind_blocks, load, number)
        for recent_tokens in RECENT_TOKENS:
            suspect = Suspect("stale_cache", "staleness", f"{text}, but for the last {recent_tokens} tokens", key)
            yield suspect, partial(_predict_behind_prompt, load, number, recent_tokens)
        if interrupted:
            text = f"goes on with the keys and values of version {number} after a refit"
            suspect = Suspect("stale_cache", "staleness", text, again)
            yield suspect, partial(_predict_behind_interruption, load, number, version)


def _predict_behind_blocks(load: Load, number: int, side: Side) -> Tensor:
    return _predict_behind(load(number), side, _list_blocks(side))


def _predict_behind_prompt(load: Load, number: int, recent_tokens: int, side: Side) -> Tensor:
    return _predict_behind(
        load(number), side, [max(0, length + 1 - recent_tokens) for length in _list_prompt_ends(side)]
    )


def _predict_behind_interruption(load: Load, number: int, version: int, side: Side) -> Tensor:
    return _predict_behind(load(number), side, _list_interruptions(side, version))


def _predict_behind(oracle: Oracle, side: Side, cuts: Sequence[int]) -> Tensor:
    # A token is predicted by the hidden state before it, which has to be computed anew by the newer model.
    firsts = [int(tokens.chosen[0]) if len(tokens.chosen) else 0 for tokens in side.tokens]
    allowed = [min(cut, max(0, first - 1)) for cut, first in zip(cuts, firsts, strict=True)]
    return side.oracle.compute_logprobs_with_cache(oracle, side.tokens, allowed, side.law)


def _list_starts(side: Side, number: int) -> list[int]:
    return [int(start) for start, _, _ in side.rollouts[number].row["spans"]]


def _list_prompt_ends(side: Side) -> list[int]:
    return [max(0, _list_starts(side, number)[0] - 1) for number in range(len(side.rollouts))]


def _list_blocks(side: Side) -> list[int]:
    return [length // BLOCK * BLOCK for length in _list_prompt_ends(side)]


def _list_interruptions(side: Side, version: int) -> list[int]:
    """Tokens before the version's first span, by rollout.

    0 for rollouts of one version.
    """
    cuts = []
    for rollout in side.rollouts:
        spans = rollout.row["spans"]
        later = [int(start) for start, _, number in spans[1:] if number == version]
        cuts.append(max(0, later[0] - 1) if later and spans[0][2] != version else 0)
    return cuts
