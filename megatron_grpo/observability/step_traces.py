"""Traces of steps: what all processes did, as files for Perfetto and as spans of OpenTelemetry.

Processes write their spans once a beat, so the trace of a step is made a little after its end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.cluster.heartbeat import read_beat_s
from megatron_grpo.cluster.phases import THIS_PROCESS
from megatron_grpo.cluster.process_log import DRIVER
from megatron_grpo.cluster.spans import Span
from megatron_grpo.observability.live.lanes import choose_order, read_spans
from megatron_grpo.observability.run_files import write_text

TRACES_FOLDER = "traces"
MOST_SPANS = 20_000  # of a step
_SERVICE = "megatron_grpo"
_FLUSH_MS = 10_000  # deadline of the last spans that a collector gets
logger = logging.getLogger(__name__)


class StepTraces:
    """Makes the traces of steps, each once its processes have written their spans."""

    def __init__(self, run_dir: Path, steps: Collection[int], endpoint: str | None) -> None:
        self._run_dir, self._steps, self._endpoint = run_dir, frozenset(steps), endpoint
        self._pending: list[tuple[int, float, float]] = []  # step, a time before it, and the time after which it is due
        self._provider = None if endpoint is None else _make_provider(run_dir, endpoint)

    def end_step(self, step: int, seconds: float) -> None:
        """Note that a step of `seconds` has ended; make due traces."""
        now = time.time()
        if self._provider is not None or step in self._steps:
            self._pending.append((step, now - 2 * seconds - 60, now + 2 * read_beat_s()))
        while self._pending and self._pending[0][2] <= now:
            self._try_to_make(*self._pending.pop(0))

    def close(self) -> None:
        """Make the remaining traces."""
        if self._pending:
            time.sleep(max(0.0, min(self._pending[-1][2] - time.time(), 2 * read_beat_s())))
        while self._pending:
            self._try_to_make(*self._pending.pop(0))
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MS)
            self._provider.shutdown()
            self._provider = None

    def _try_to_make(self, step: int, begin: float, end: float) -> None:
        try:
            self._make(step, begin, end)
        except (OSError, ValueError) as error:  # a full disk does not end a run that only wants to be seen
            logger.warning("the trace of step %d could not be made: %s", step, error)

    def _make(self, step: int, begin: float, end: float) -> None:
        if THIS_PROCESS.spans is not None:
            THIS_PROCESS.spans.write(ended=True)
        spans = select_step(read_spans(self._run_dir, begin, end), step)
        if not any(spans.values()):
            logger.warning("step %d has no trace: its spans are not written", step)
            return
        if step in self._steps:
            folder = self._run_dir / TRACES_FOLDER
            folder.mkdir(exist_ok=True)
            write_text(folder / f"step_{step}.json", json.dumps({"traceEvents": make_events(spans)}))
        if self._provider is not None:
            _export(self._provider.get_tracer(_SERVICE), spans, step)


def select_step(spans: Mapping[str, Sequence[Span]], step: int) -> dict[str, list[Span]]:
    """Select the spans that overlap a step; empty: it has none."""
    step_span = next((span for span in reversed(spans.get(DRIVER, ())) if span.phase == f"step {step}"), None)
    if step_span is None:
        return {}
    within = {
        name: [span for span in process_spans if span.end > step_span.begin and span.begin < step_span.end]
        for name, process_spans in spans.items()
    }
    limit = max(MOST_SPANS // max(len(within), 1), 1)
    return {
        name: sorted(process_spans, key=lambda span: -span.seconds)[:limit]
        for name, process_spans in within.items()
        if process_spans
    }


def make_events(spans: Mapping[str, Sequence[Span]]) -> list[dict[str, Any]]:
    """Make events of Chrome's trace format, by process."""
    events: list[dict[str, Any]] = []
    for number, name in enumerate(choose_order(spans), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        for span, row in assign_rows(spans[name]):
            event = {"ph": "X", "name": span.phase, "pid": number, "tid": row, "ts": round(span.begin * 1e6)}
            memory = {} if span.gpu_gib is None else {"args": {"GPU GiB": span.gpu_gib}}
            events.append(event | {"dur": round(span.seconds * 1e6)} | memory)
    return events


def assign_rows(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Assign each span a row whose earlier spans enclose or precede it."""
    rows: list[list[float]] = []  # of each row, the ends of the spans that are open, outermost first
    assigned = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.seconds)):
        row = next((number for number, ends in enumerate(rows) if _fits(span, ends)), len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(span.end)
        assigned.append((span, row))
    return assigned


def _fits(span: Span, open_ends: list[float]) -> bool:
    """True if a span nests in the open spans of a row.

    Those that have ended are removed.
    """
    while open_ends and open_ends[-1] <= span.begin:
        open_ends.pop()
    return not open_ends or span.end <= open_ends[-1]


def _make_provider(run_dir: Path, endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": _SERVICE, "run": run_dir.resolve().name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # The processor's thread sends them: a collector that is away holds nothing up.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint), max_queue_size=2 * MOST_SPANS))
    return provider


def _export(tracer: Any, spans: Mapping[str, Sequence[Span]], step: int) -> None:
    from opentelemetry.trace import set_span_in_context

    root_span = next(span for span in spans[DRIVER] if span.phase == f"step {step}")
    root = tracer.start_span("step", start_time=_to_ns(root_span.begin), attributes={"step": step})
    context = set_span_in_context(root)
    for name, process_spans in spans.items():
        for span in process_spans:
            if span is root_span:
                continue
            attributes = {"process": name, "step": step}
            child = tracer.start_span(span.phase, context, start_time=_to_ns(span.begin), attributes=attributes)
            child.end(_to_ns(span.end))
    root.end(_to_ns(root_span.end))


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)
