"""Spans of phases: calls that overlap or follow at once are one, and a file is bounded."""

import json
from pathlib import Path
from typing import Any

from megatron_grpo.cluster import spans
from megatron_grpo.cluster.phases import Phases
from megatron_grpo.cluster.spans import FILE_BYTES, SpanRecorder


def read_lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]


def test_overlapping_calls_are_one_span(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path, "a")
    for name, phase, now in (
        ("enter", "generate", 10.0),
        ("enter", "generate", 11.0),
        ("leave", "generate", 12.0),
        ("enter", "refit", 12.5),
        ("leave", "generate", 13.0),
        ("leave", "refit", 14.0),
    ):
        getattr(recorder, name)(phase, now)
    recorder.write()
    assert read_lines(tmp_path) == [[10.0, 3.0, "generate"], [12.5, 1.5, "refit"]]


def test_calls_that_follow_at_once_are_one_span(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path, "a")
    for begin in (10.0, 10.11, 11.0):
        recorder.enter("score", begin)
        recorder.leave("score", begin + 0.1)
    recorder.write(ended=True)
    assert read_lines(tmp_path) == [[10.0, 0.21, "score"], [11.0, 0.1, "score"]]


def test_a_file_is_bounded(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path, "a")
    for number in range(3):
        for call in range(30_000):
            recorder.enter("phase of a name of some length, as a function may have", 1e5 * number + call)
            recorder.leave("phase of a name of some length, as a function may have", 1e5 * number + call + 0.5)
        recorder.write()
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) <= {"a.jsonl", "a.jsonl.older"}
    assert sum(sizes.values()) < 2 * FILE_BYTES + 30_000 * 90


def test_a_disk_that_takes_nothing_does_not_end_the_process(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path, "a")
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "elsewhere")
    recorder.enter("train", 1.0)
    recorder.leave("train", 2.0)
    recorder.write()
    assert not (tmp_path / "elsewhere").exists(), "a link leads to a file of somebody's"
    (tmp_path / "a.jsonl").unlink()
    recorder.write()
    assert read_lines(tmp_path) == [[1.0, 1.0, "train"]]


def test_phases_are_recorded_and_a_forked_child_records_none(tmp_path: Path) -> None:
    phases = Phases()
    phases.spans = SpanRecorder(tmp_path, "a")
    token = phases.enter("train")
    phases.leave(token)
    phases.spans.write(ended=True)
    ((_, seconds, phase),) = read_lines(tmp_path)
    assert phase == "train"
    assert 0 <= seconds < 1
    phases.lock.acquire()
    phases.reset_child()
    assert phases.spans is None


def test_no_gpu_is_asked_for_memory_unless_torch_uses_one() -> None:
    assert spans.read_gpu_gib() is None
