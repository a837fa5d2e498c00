"""Counts of an engine's work, from vLLM's scheduler and from the engine's actor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from megatron_grpo.batch.generation_requests import EngineCounts

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


class EngineStatistics:
    """A stat logger; vLLM's base class takes seconds to import."""

    def __init__(self) -> None:
        self._counts = EngineCounts()
        self._busy_since: float | None = None

    def __call__(self, _config: Any, _engine: int) -> EngineStatistics:
        return self  # vLLM expects a factory of loggers

    def attach(self, llm: AsyncLLM, *, has_prometheus: bool = False) -> None:
        """Become the only logger, beside Ray's with `has_prometheus`.

        vLLM's own Prometheus logger costs time, and nothing scrapes it here.
        """
        manager = llm.logger_manager
        assert manager is not None, "an engine with loggers has a manager of them"
        manager.stat_loggers = [self]
        if has_prometheus:
            from ray.util import metrics
            from vllm.v1.metrics import ray_wrappers

            # vLLM takes Ray's metrics only where Ray Serve is installed, which it needs for one label alone.
            ray_wrappers.ray_metrics = metrics
            manager.stat_loggers.append(ray_wrappers.RayPrometheusStatLogger(llm.vllm_config, manager.engine_indexes))

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, **__: Any) -> None:
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

    # vLLM calls these two as well.

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...

    def count_tokens(self, tokens: int) -> None:
        self._counts.tokens += tokens

    def set_in_flight(self, requests: int) -> None:
        if requests and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not requests:
            self._count_time()
            self._busy_since = None

    def take(self) -> EngineCounts:
        """Return the counts since the last call, and reset them."""
        self._count_time()
        counts, self._counts = self._counts, EngineCounts()
        return counts

    def _count_time(self) -> None:
        if self._busy_since is not None:
            now = time.monotonic()
            self._counts.busy_s += now - self._busy_since
            self._busy_since = now
