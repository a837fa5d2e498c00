"""An engine's counts, from what vLLM says of its scheduler after every pass."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_grpo.data.engine_counts import EngineCounts

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


class EngineStatistics:
    """A stat logger of vLLM, by its methods: it cannot inherit from vLLM's, which takes seconds to import."""

    def __init__(self) -> None:
        self._counts = EngineCounts()
        self._busy_since: float | None = None

    def __call__(self, _config: Any, _engine: int) -> EngineStatistics:
        """Itself: vLLM takes loggers as functions that make them."""
        return self

    def attach(self, llm: AsyncLLM) -> None:
        """Be the only logger of an engine: vLLM adds one for Prometheus, which nobody asks and which takes its time."""
        manager = llm.logger_manager
        assert manager is not None, "an engine with loggers has a manager of them"
        manager.stat_loggers = [self]

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, **__: Any) -> None:
        """Called by vLLM after every pass."""
        stats, counts = scheduler_stats, self._counts
        if stats is None:
            return
        counts.running = max(counts.running, stats.num_running_reqs)
        counts.waiting = max(counts.waiting, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        counts.kv_cache_usage = max(counts.kv_cache_usage, stats.kv_cache_usage)
        counts.prefix_tokens += stats.prefix_cache_stats.queries
        counts.prefix_hits += stats.prefix_cache_stats.hits
        if stats.spec_decoding_stats is not None:
            counts.drafted += stats.spec_decoding_stats.num_draft_tokens
            counts.accepted += stats.spec_decoding_stats.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Called by vLLM at its start."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Called by vLLM when the engine falls asleep or wakes."""

    def completed(self, tokens: int) -> None:
        """So many tokens of responses are complete."""
        self._counts.tokens += tokens

    def in_flight(self, requests: int) -> None:
        """So many requests are in flight now."""
        if requests and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not requests:
            self._count_time()
            self._busy_since = None

    def take(self) -> EngineCounts:
        """What was counted since the last call."""
        self._count_time()
        taken, self._counts = self._counts, EngineCounts()
        return replace(taken)

    def _count_time(self) -> None:
        if self._busy_since is not None:
            now = time.monotonic()
            self._counts.busy_s += now - self._busy_since
            self._busy_since = now
