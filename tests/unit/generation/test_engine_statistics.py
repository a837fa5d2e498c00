"""An engine's counts, from what vLLM's scheduler says; vLLM's own class of it is imported."""

from __future__ import annotations

import pytest
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from megatron_grpo.generation import engine_statistics
from megatron_grpo.generation.engine_statistics import EngineStatistics


def passed(running: int, waiting: int, usage: float, looked_up: int = 0, hits: int = 0) -> SchedulerStats:
    prefix = PrefixCacheStats(queries=looked_up, hits=hits)
    return SchedulerStats(
        num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage, prefix_cache_stats=prefix
    )


def test_peaks_and_sums_since_the_last_look() -> None:
    statistics = EngineStatistics()
    statistics.record(passed(3, 5, 0.25, looked_up=40, hits=10), None)
    statistics.record(None, None)
    statistics.record(passed(8, 0, 0.125, looked_up=20, hits=20), None, mm_cache_stats=None, engine_idx=0)
    statistics.count_tokens(7)
    statistics.count_tokens(4)
    taken = statistics.take()
    assert (taken.running, taken.waiting, taken.kv_cache_usage) == (8, 5, 0.25)
    assert (taken.prefix_tokens, taken.prefix_hits, taken.tokens, taken.drafted) == (60, 30, 11, 0)
    assert statistics.take().running == 0


def test_proposed_tokens() -> None:
    statistics, drafts = EngineStatistics(), SpecDecodingStats.new(4)
    drafts.observe_draft(num_draft_tokens=4, num_accepted_tokens=1)
    stats = passed(1, 0, 0.0)
    stats.spec_decoding_stats = drafts
    statistics.record(stats, None)
    taken = statistics.take()
    assert (taken.drafted, taken.accepted) == (4, 1)


def test_only_time_with_requests_in_flight_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0, 21.0, 25.0, 26.0])
    monkeypatch.setattr(engine_statistics.time, "monotonic", lambda: next(clock))
    statistics = EngineStatistics()
    statistics.set_in_flight(2)  # at 10
    statistics.set_in_flight(1)
    statistics.set_in_flight(0)  # at 13
    statistics.set_in_flight(0)
    statistics.set_in_flight(4)  # at 20
    assert statistics.take().busy_s == 4.0  # at 21
    statistics.set_in_flight(0)  # at 25
    assert statistics.take().busy_s == 4.0
