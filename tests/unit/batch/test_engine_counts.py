"""The figures of a step's engines, by hand."""

from __future__ import annotations

from megatron_grpo.batch.generation_requests import EngineCounts, compute_engine_metrics
from tests.support.documented import undocumented

FIRST = EngineCounts(
    running=8, waiting=0, kv_cache_usage=0.25, prefix_tokens=100, prefix_hits=75, tokens=300, busy_s=2.0
)
SECOND = EngineCounts(
    running=4, waiting=3, kv_cache_usage=0.5, prefix_tokens=300, prefix_hits=25, tokens=100, busy_s=1.0
)


def test_figures_of_two_engines() -> None:
    assert compute_engine_metrics([FIRST, SECOND]) == {
        "engine_running": 8.0,
        "engine_waiting": 3.0,
        "engine_kv_cache_usage": 0.5,
        "engine_tokens_per_s": 125.0,
        "engine_prefix_hit_rate": 0.25,
    }


def test_two_periods_of_an_engine() -> None:
    assert (
        EngineCounts(
            running=8, waiting=3, kv_cache_usage=0.5, prefix_tokens=400, prefix_hits=100, tokens=400, busy_s=3.0
        )
        == FIRST + SECOND
    )


def test_an_engine_that_did_nothing_has_no_speed_and_nothing_without_a_lookup_a_rate() -> None:
    assert compute_engine_metrics([FIRST, EngineCounts()])["engine_tokens_per_s"] == 150.0
    assert compute_engine_metrics([EngineCounts()]) == {
        "engine_running": 0.0,
        "engine_waiting": 0.0,
        "engine_kv_cache_usage": 0.0,
    }


def test_proposed_tokens_and_documentation() -> None:
    figures = compute_engine_metrics([EngineCounts(drafted=8, accepted=2), FIRST])
    assert figures["engine_draft_acceptance_rate"] == 0.25
    assert undocumented(figures) == set()
