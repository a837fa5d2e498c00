"""Figures that are read as their file grows, and thinned to points that keep what stands out."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.observability.live.series import METRICS, SeriesFile, reduce_columns


def make_line(step: int, **figures: Any) -> str:
    return json.dumps({"step": step, "reward": step / 10, **figures, "timing": {"total": 1.0}, "throughput": {}}) + "\n"


def test_a_growing_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = SeriesFile(path)
    series.read_more()
    assert series.select_columns(METRICS) == {"step": []}
    first, second = make_line(1), make_line(2)
    path.write_text(first + second[:10])
    series.read_more()
    assert series.select_columns(METRICS) == {"step": [1], "reward": [0.1]}
    with path.open("a") as file:
        file.write(second[10:] + make_line(3, late=7))
    series.read_more()
    assert series.select_columns(METRICS) == {"step": [1, 2, 3], "reward": [0.1, 0.2, 0.3], "late": [None, None, 7.0]}
    assert series.select_columns(METRICS, after=2)["step"] == [3]
    assert series.select_columns("timing") == {"step": [1, 2, 3], "total": [1.0] * 3}


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(make_line, range(1, 6))))
    series = SeriesFile(path)
    series.read_more()
    version = series.version
    (tmp_path / "new").write_text("".join(map(make_line, range(1, 8))))
    (tmp_path / "new").replace(path)
    series.read_more()
    assert list(series.steps) == [1, 2, 3, 4, 5, 6, 7]
    assert series.version != version


def test_lines_that_are_none_of_a_step_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        "[1]",
        "{",
        '{"step": true}',
        '{"step": 1, "reward": NaN, "text": "x", "huge": 1e999, "timing": 5}',
        "[" * 9999,
    ]
    path.write_text("\n".join(lines) + "\n" + make_line(2))
    series = SeriesFile(path)
    series.read_more()
    assert series.select_columns(METRICS) == {"step": [1, 2], "reward": [None, 0.2]}


def test_a_link_or_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "other").write_text(make_line(1))
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "other")
    series = SeriesFile(tmp_path / "metrics.jsonl")
    series.read_more()
    assert list(series.steps) == []


def test_thinning_keeps_extremes_and_their_order() -> None:
    steps = list(range(1, 20_001))
    values = np.sin(np.arange(20_000) / 500)
    values[7777], values[12_345] = 50.0, -40.0
    values[100:400] = math.nan
    thinned = reduce_columns(steps, {"x": values}, 1000)
    assert len(thinned["step"]) == len(thinned["x"]) == 1000
    assert thinned["step"] == sorted(thinned["step"])
    assert (thinned["step"][0], thinned["step"][-1]) == (1, 20_000)
    present = [value for value in thinned["x"] if value is not None]
    assert (max(present), min(present)) == (50.0, -40.0)
    parts = np.array_split(values, 500)
    for part, low, high in zip(parts, thinned["x"][::2], thinned["x"][1::2], strict=True):
        if np.isfinite(part).any():
            np.testing.assert_allclose(sorted((low, high)), (np.nanmin(part), np.nanmax(part)), rtol=1e-5)


def test_few_rows_stay_as_they_are() -> None:
    assert reduce_columns([3, 4], {"x": [1.5, math.nan]}) == {"step": [3, 4], "x": [1.5, None]}
