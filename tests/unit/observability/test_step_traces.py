"""Traces of steps: the spans of all processes within a step, on rows where they nest."""

import json
import time
from pathlib import Path

import pytest

from megatron_grpo.cluster.heartbeat import BEAT_VARIABLE
from megatron_grpo.cluster.spans import Span
from megatron_grpo.observability.step_traces import StepTraces, assign_rows, make_events, select_step
from tests.support.watched import write_spans


def test_a_trace_has_what_all_processes_did_in_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEAT_VARIABLE, "0.05")
    write_spans(tmp_path, begin=time.time() - 10, steps=10)
    traces = StepTraces(tmp_path, [9, 4], None)
    for step in range(4, 11):
        traces.end_step(step, 1.0)
    traces.close()
    traces.close()
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == ["step_4.json", "step_9.json"]
    events = json.loads((tmp_path / "traces" / "step_9.json").read_text())["traceEvents"]
    (step,) = [event for event in events if event["name"] == "step 9"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["driver", "policy rank 0", "policy rank 1", "generation engine 0", "rollout worker 0"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"generate", "train", "send weights", "receive weights"}
    assert all(event["ts"] + event["dur"] > step["ts"] for event in spans)
    assert [event["args"] for event in spans if event["name"] == "train" and event["pid"] == 2] == [{"GPU GiB": 30.5}]


def test_a_step_whose_spans_are_missing_has_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEAT_VARIABLE, "0.01")
    traces = StepTraces(tmp_path, [1], None)
    traces.end_step(1, 1.0)
    traces.close()
    assert not (tmp_path / "traces").exists()


def test_spans_nest_on_a_row_or_take_another() -> None:
    spans = [
        *(Span("p", "outer", 0, 10), Span("p", "inner", 1, 3), Span("p", "crossing", 2, 6), Span("p", "next", 4, 2)),
        *(Span("p", "later", 12, 1),),
    ]
    rows = {span.phase: row for span, row in assign_rows(spans)}
    assert rows == {"outer": 0, "inner": 0, "crossing": 1, "next": 0, "later": 0}
    open_ends: dict[int, list[float]] = {}
    for span, row in assign_rows(spans):
        ends = [end for end in open_ends.get(row, []) if end > span.begin]
        assert all(span.end <= end for end in ends), "a row has only spans that nest"
        open_ends[row] = [*ends, span.end]


def test_only_spans_of_the_step_are_selected() -> None:
    spans = {"driver": [Span("driver", "step 2", 10, 5)], "a": [Span("a", "x", 0, 10), Span("a", "y", 14, 9)], "b": []}
    assert select_step(spans, 2) == {"driver": spans["driver"], "a": [spans["a"][1]]}
    assert select_step(spans, 3) == {}
    assert len(make_events(select_step(spans, 2))) == 2 * 2 + 2
