"""Lanes: what every process of a run did over a time, from the files of its spans."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.cluster.heartbeat import HEARTBEATS_FOLDER, Heartbeat, read_heartbeats
from megatron_grpo.cluster.phases import SERVE
from megatron_grpo.cluster.process_log import DRIVER, LOGS_FOLDER
from megatron_grpo.cluster.spans import FILE_BYTES, OLDER, SPANS_FOLDER, Span
from megatron_grpo.config.outside_files import parse_file_json, require_regular

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BUCKETS = 800  # equal parts of the time that is shown; a part shows the phase that took most of it
MOST_LANES = 128
STEP_PHASE = re.compile(r"step (\d{1,12})")  # phase of the driver around a step
RUNNING_S = 30.0  # a heartbeat that is no older is of a process that lives
_ENGINE, _RANK = re.compile(r"generation engine \d+"), re.compile(r"(policy|value) rank \d+")  # names of processes
_NUMBERED = re.compile(r" of version \d+| \d+$")  # what is left out of the name of a phase
_LASTING = frozenset({SERVE})  # phases of processes that are always in one
_BLOCK_BYTES = 2**16  # of a file that are read at a time, from its end
_ORDER_S = 10.0  # spans are written in the order of their ends, but for the seconds between two beats
IDLE = -1  # number of no phase


def read_spans(run_dir: Path, begin: float, end: float) -> dict[str, list[Span]]:
    """Read the spans of each process that overlap a time, sorted by their begin.

    Phases that processes are in now, by their heartbeats, end at `end`. Damaged lines are left out.
    """
    folder = run_dir / LOGS_FOLDER
    heartbeats = read_heartbeats(folder / HEARTBEATS_FOLDER) if (folder / HEARTBEATS_FOLDER).is_dir() else {}
    names = {re.sub(r"[^\w.-]+", "_", name.strip()).lower(): name for name in heartbeats}
    spans: dict[str, list[Span]] = {}
    for stem in sorted({file.name.partition(".jsonl")[0] for file in (folder / SPANS_FOLDER).glob("*.jsonl*")}):
        name = names.get(stem, stem.replace("_", " "))
        process_spans = _read_tail(folder / SPANS_FOLDER / f"{stem}.jsonl", name, begin)
        if not process_spans or process_spans[0].begin > begin:
            process_spans = _read_tail(folder / SPANS_FOLDER / f"{stem}.jsonl{OLDER}", name, begin) + process_spans
        if name in heartbeats:
            process_spans += _list_current(heartbeats[name], process_spans)
        spans[name] = sorted((span for span in process_spans if span.end > begin and span.begin < end), key=_get_begin)
    return spans


def _get_begin(span: Span) -> float:
    return span.begin


def _list_current(heartbeat: Heartbeat, spans: Sequence[Span]) -> list[Span]:
    # A process that was killed leaves phases in its heartbeat, which end with its last beat.
    if not spans and not heartbeat.phases:
        return []
    return [
        Span(heartbeat.name, strip_number(phase.name), phase.since, max(heartbeat.beat - phase.since, 0.0))
        for phase in heartbeat.phases
        if phase.name not in _LASTING
    ]


def strip_number(phase: str) -> str:
    """Leave the number out of a phase's name, except for that of a step."""
    return phase if STEP_PHASE.fullmatch(phase) else _NUMBERED.sub("", phase)


def _read_tail(path: Path, name: str, begin: float) -> list[Span]:
    """Read the end of a file, back to spans that ended before `begin`."""
    content = b""
    try:
        require_regular(path, links=False)
        with path.open("rb") as file:
            position = min(file.seek(0, os.SEEK_END), 4 * FILE_BYTES)
            while position > 0:
                size = min(position, _BLOCK_BYTES)
                position -= size
                file.seek(position)
                content = file.read(size) + content
                # The first line of a block is complete only behind its first line break.
                first = _parse_spans(content.split(b"\n", 2)[1:2], name)
                if first and first[0].end < begin - _ORDER_S:
                    break
    except (OSError, ValueError):
        return []
    lines = content.split(b"\n")[:-1]
    return _parse_spans(lines if position == 0 else lines[1:], name)


def _parse_spans(lines: Iterable[bytes], name: str) -> list[Span]:
    spans = []
    for line in lines:
        try:
            begin, seconds, phase, *memory = parse_file_json(line)
            gpu_gib = float(memory[0]) if memory else None
            spans.append(Span(name, strip_number(str(phase)[:80]), float(begin), float(seconds), gpu_gib))
        except (TypeError, ValueError):
            continue
    return spans


def find_last_time(run_dir: Path) -> float:
    """Find the time of the last span; now while heartbeats are fresh."""
    folder, now = run_dir / LOGS_FOLDER, time.time()
    beats = [file.stat().st_mtime for file in (folder / HEARTBEATS_FOLDER).glob("*.json")]
    spans = [file.stat().st_mtime for file in (folder / SPANS_FOLDER).glob("*.jsonl")]
    return now if now - max(beats, default=0.0) < RUNNING_S else max(spans, default=now)


def choose_order(names: Iterable[str]) -> list[str]:
    """Sort processes: the driver, ranks, engines, the others; numbers by their value."""
    groups = (DRIVER, "policy", "value", "teacher", "generation", "rollout")

    def rank(name: str) -> tuple[Any, ...]:
        kind = next((number for number, group in enumerate(groups) if name.startswith(group)), len(groups))
        return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return sorted(names, key=rank)


def make_lanes(spans: Mapping[str, Sequence[Span]], begin: float, end: float) -> dict[str, Any]:
    """Make the lanes that the page draws, of bounded size.

    `lanes` have `runs`, lists [first bucket, one past the last, number of the phase], and the exact share of the time
    that each phase took. `steps`: [step, begin, end] within the time, in seconds from its begin.
    """
    numbers: dict[str, int] = {}
    lanes, painted = [], {}
    for name in choose_order(spans)[:MOST_LANES]:
        inner = [span for span in spans[name] if not STEP_PHASE.fullmatch(span.phase)]
        buckets = fill_buckets(inner, begin, end, numbers)
        painted[name] = buckets
        lanes.append({"name": name, "runs": find_runs(buckets), "shares": _sum_shares(inner, begin, end)})
    return {
        "begin": begin,
        "seconds": end - begin,
        "buckets": BUCKETS,
        "phases": list(numbers),
        "lanes": lanes,
        "left_out": max(len(spans) - MOST_LANES, 0),
        "steps": _list_steps(spans.get(DRIVER, ()), begin, end),
        "shares": summarize_overlap(painted),
        "memory": _find_memory(spans),
    }


def fill_buckets(spans: Sequence[Span], begin: float, end: float, numbers: dict[str, int]) -> NDArray[np.int16]:
    """Fill each bucket with the phase that took most of it.

    Inner phases lie over outer ones. Returns [BUCKETS], IDLE for none. `numbers`: of each phase, which is extended.
    """
    import numpy as np

    width = (end - begin) / BUCKETS
    painted = np.full(BUCKETS, IDLE, dtype=np.int16)
    short: dict[int, np.ndarray[Any, Any]] = {}  # seconds of spans below a bucket, by phase
    for span in sorted(spans, key=lambda span: -span.seconds):
        number = numbers.setdefault(span.phase, len(numbers))
        first, last = (max(span.begin, begin) - begin) / width, (min(span.end, end) - begin) / width
        if round(last) > round(first):
            painted[round(first) : round(last)] = number
        else:
            cover = short.setdefault(number, np.zeros(BUCKETS))
            cover[min(int(first), BUCKETS - 1)] += last - first
    if short:
        covers = np.stack(list(short.values()))
        is_most = covers.max(axis=0) >= 0.5
        painted[is_most] = np.asarray(list(short))[covers.argmax(axis=0)][is_most]
    return painted


def find_runs(buckets: NDArray[np.int16]) -> list[list[int]]:
    """Find runs of equal buckets, without idle ones: [first, one past the last, number]."""
    import numpy as np

    bounds = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
    pairs = itertools.pairwise(bounds)
    return [[first, last, int(buckets[first])] for first, last in pairs if buckets[first] != IDLE]


def _sum_shares(spans: Sequence[Span], begin: float, end: float) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.phase] += min(span.end, end) - max(span.begin, begin)
    return {
        phase: round(total / (end - begin), 4) for phase, total in sorted(seconds.items(), key=lambda item: -item[1])
    }


def summarize_overlap(painted: Mapping[str, NDArray[np.int16]]) -> dict[str, float]:
    """Summarize how processes overlap, in shares of the time.

    generating, training: some engine, or some rank, is at work; exposed_generation: an engine is and no rank;
    engine_bubble, rank_bubble: idle share of the mean engine and rank.
    """
    import numpy as np

    engines = [lane != IDLE for name, lane in painted.items() if _ENGINE.fullmatch(name)]
    ranks = [lane != IDLE for name, lane in painted.items() if _RANK.fullmatch(name)]
    if not engines or not ranks:
        return {}
    generating, training = np.any(engines, axis=0), np.any(ranks, axis=0)
    figures = {
        "generating": generating.mean(),
        "training": training.mean(),
        "exposed_generation": (generating & ~training).mean(),
        "engine_bubble": 1 - np.mean(engines),
        "rank_bubble": 1 - np.mean(ranks),
    }
    return {name: round(float(value), 4) for name, value in figures.items()}


def _list_steps(spans: Sequence[Span], begin: float, end: float) -> list[list[float]]:
    matches = ((STEP_PHASE.fullmatch(span.phase), span) for span in spans)
    steps = [[int(match[1]), round(s.begin - begin, 3), round(s.end - begin, 3)] for match, s in matches if match]
    return steps[-BUCKETS:]


def _find_memory(spans: Mapping[str, Sequence[Span]]) -> list[list[Any]]:
    """Find the most GiB that torch held after each phase."""
    largest: dict[tuple[str, str], float] = {}
    for name, process_spans in spans.items():
        kind = re.split(r"\d", name, maxsplit=1)[0].strip()
        for span in process_spans:
            if span.gpu_gib is not None:
                largest[kind, span.phase] = max(largest.get((kind, span.phase), 0.0), span.gpu_gib)
    return [[kind, phase, gib] for (kind, phase), gib in sorted(largest.items())]
