"""What a generation engine had to do in a while, and the figures of a step that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """Of one engine."""

    running: int = 0
    """Most responses that were decoded together."""
    waiting: int = 0
    """Most requests that waited for others to end."""
    kv_cache_usage: float = 0.0
    """Largest share of the KV cache that was taken."""
    prefix_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were there."""
    drafted: int = 0
    """Tokens that speculative decoding proposed."""
    accepted: int = 0
    """Those of them that were kept."""
    tokens: int = 0
    """Tokens of the responses that were completed."""
    busy_s: float = 0.0
    """Seconds in which some request was in flight."""


def engine_figures(counts: Sequence[EngineCounts]) -> dict[str, float]:
    """The figures of a step.

    Args:
        counts: of every engine, since the step before.

    Returns:
        engine_running, engine_waiting and engine_kv_cache_usage: the largest of the engines; engine_tokens_per_s: mean
        over engines that completed something; engine_prefix_hit_rate and, with speculative decoding,
        engine_draft_acceptance_rate: over the tokens of all. Without a lookup or a proposal there is no rate.
    """
    looked_up, drafted = sum(one.prefix_tokens for one in counts), sum(one.drafted for one in counts)
    speeds = [one.tokens / one.busy_s for one in counts if one.busy_s > 0]
    return {
        "engine_running": float(max(one.running for one in counts)),
        "engine_waiting": float(max(one.waiting for one in counts)),
        "engine_kv_cache_usage": max(one.kv_cache_usage for one in counts),
        **({"engine_tokens_per_s": fmean(speeds)} if speeds else {}),
        **({"engine_prefix_hit_rate": sum(one.prefix_hits for one in counts) / looked_up} if looked_up else {}),
        **({"engine_draft_acceptance_rate": sum(one.accepted for one in counts) / drafted} if drafted else {}),
    }
