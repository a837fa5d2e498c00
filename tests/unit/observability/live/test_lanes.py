"""Lanes: spans of files, painted into buckets, and how much of the work overlaps."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo.cluster.spans import Span
from megatron_grpo.observability.live import lanes
from megatron_grpo.observability.live.lanes import (
    BUCKETS,
    IDLE,
    choose_order,
    fill_buckets,
    find_runs,
    make_lanes,
    read_spans,
    strip_number,
    summarize_overlap,
)
from tests.support.watched import write_spans


def test_most_of_a_bucket_is_painted_and_inner_phases_over_outer_ones() -> None:
    numbers: dict[str, int] = {}
    spans = [Span("p", "outer", 0.0, 400.0), Span("p", "inner", 100.0, 50.0)]
    spans += [Span("p", "short", 600.1 + 0.05 * n, 0.04) for n in range(16)]  # 0.64 of bucket 600
    spans += [Span("p", "rare", 700.2, 0.1)]
    painted = fill_buckets(spans, 0.0, float(BUCKETS), numbers)
    runs = [(begin, end, list(numbers)[number]) for begin, end, number in find_runs(painted)]
    assert runs == [(0, 100, "outer"), (100, 150, "inner"), (150, 400, "outer"), (600, 601, "short")]


def test_spans_beyond_the_time_are_cut() -> None:
    painted = fill_buckets([Span("p", "x", -50.0, 1000.0)], 0.0, 10.0, {})
    assert find_runs(painted) == [[0, BUCKETS, 0]]


def test_exposed_generation_is_what_no_rank_overlaps() -> None:
    def paint(*busy: tuple[int, int]) -> np.ndarray:
        lane = np.full(BUCKETS, IDLE, dtype=np.int16)
        for begin, end in busy:
            lane[begin:end] = 0
        return lane

    half, quarter = BUCKETS // 2, BUCKETS // 4
    shares = summarize_overlap(
        {
            "driver": paint((0, BUCKETS)),
            "generation engine 0": paint((0, half)),
            "generation engine 0 worker 0": paint((0, BUCKETS)),
            "policy rank 0": paint((quarter, half)),
            "policy rank 1": paint((quarter, half + quarter)),
        }
    )
    assert shares == {
        "generating": 0.5,
        "training": 0.5,
        "exposed_generation": 0.25,
        "engine_bubble": 0.5,
        "rank_bubble": 0.625,
    }
    assert summarize_overlap({"driver": paint((0, 5))}) == {}


def test_a_window_of_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    end = write_spans(tmp_path, begin=1e9, steps=20_000)
    began = time.process_time()
    spans = read_spans(tmp_path, end - 10, end)
    seconds = time.process_time() - began
    assert {len(spans[name]) for name in ("policy rank 0", "policy rank 1")} <= {19, 20, 21}
    drawing = make_lanes(spans, end - 10, end)
    assert [step for step, *_ in drawing["steps"]][-1] == 20_000
    assert len(json.dumps(drawing)) < 100_000
    assert seconds < 1.0, "the whole files take ten times as long"
    long_drawing = make_lanes(read_spans(tmp_path, 1e9, end), 1e9, end)
    assert len(json.dumps(long_drawing)) < 300_000


def test_shares_are_exact(tmp_path: Path) -> None:
    spans = {"policy rank 0": [Span("policy rank 0", "train", 1.0, 2.0), Span("policy rank 0", "train", 9.0, 5.0)]}
    (lane,) = make_lanes(spans, 0.0, 10.0)["lanes"]
    assert lane["shares"] == {"train": 0.3}


def test_damaged_lines_and_links_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "spans"
    folder.mkdir(parents=True)
    good = json.dumps([5.0, 1.0, "train"])
    (folder / "driver.jsonl").write_text(f'x\n[1]\n{{}}\n["a", 1, "b"]\n{good}\n[6.0, 1.0, "cut')
    (folder / "other.jsonl").symlink_to(folder / "driver.jsonl")
    assert read_spans(tmp_path, 0.0, 10.0) == {"driver": [Span("driver", "train", 5.0, 1.0)], "other": []}


def test_processes_have_an_order() -> None:
    names = [
        "rollout worker 0",
        "generation engine 10",
        "policy rank 10",
        "driver",
        "policy rank 9",
        "generation engine 2",
    ]
    assert choose_order(names) == [
        *("driver", "policy rank 9", "policy rank 10", "generation engine 2", "generation engine 10"),
        "rollout worker 0",
    ]


def test_many_processes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_LANES", 3)
    drawing = make_lanes({f"policy rank {rank}": [] for rank in range(5)}, 0.0, 1.0)
    assert (len(drawing["lanes"]), drawing["left_out"]) == (3, 2)


def test_numbers_are_left_out_of_phases() -> None:
    assert [strip_number(name) for name in ("commit of version 12", "score 3", "step 12", "train")] == [
        *("commit", "score", "step 12", "train")
    ]
