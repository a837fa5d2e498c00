"""Reads every row of a set once: which can be used, what is wrong with the others, what there is in all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.config.errors import Problem
from megatron_grpo.data.rows import Row, RowCheck
from megatron_grpo.data.sources import Source, SourceError, open_source
from megatron_grpo.data.specs import ROW_FORMS, processor_name, task_spec

_SHOWN = 5
"""Bad rows of one set that are reported singly."""
_CHUNK = 65536
"""Rows whose numbers and digests are gathered in Python before they go into an array."""


@dataclass(slots=True)
class SetReport:
    """What a set of rows holds."""

    rows: int = 0
    """Rows that can be used."""
    tasks: set[str] = field(default_factory=set)
    """Names of the environments that the rows are for."""
    alike: bool = True
    """Whether all prompts of the set are equal."""
    duplicates: int = 0
    """Rows whose prompt an earlier row has too."""
    columns: dict[str, set[str]] = field(default_factory=dict)
    """Names of the columns of each task's rows, once they are in form."""
    bad: int = 0
    """Rows that cannot be used."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the set, or with rows, each under its file:line; with data.bad_rows=skip not with rows."""
    remarks: list[Problem] = field(default_factory=list)
    """What is worth a remark, bad rows that are skipped among it."""


@dataclass(slots=True)
class Examined:
    """A set of rows that was looked at."""

    report: SetReport
    source: Source | None = None
    """The rows; None: they cannot be read."""
    usable: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[usable rows], int64: their numbers in the source."""


def examined(config: DatasetConfig, data: DataConfig, environments: Mapping[str, str]) -> Examined:
    """A set of rows, looked at once in a process as long as its file stays as it is.

    Args:
        config: which set.
        data: how rows become prompts.
        environments: type of each environment, by task name.
    """
    try:
        status = os.stat(config.path)
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
    except (OSError, ValueError):  # a hub set; ValueError: a NUL character, which no name has
        version = (0, 0, 0)
    said = json.dumps([asdict(config), asdict(data), dict(environments)], default=str)
    if (said, version) not in _known:
        _known[said, version] = _examine(config, data, environments)
    return _known[said, version]


_known: dict[tuple[str, tuple[int, int, int]], Examined] = {}
"""What this process has looked at: the checks before a run and the run itself need it."""


def _examine(config: DatasetConfig, data: DataConfig, environments: Mapping[str, str]) -> Examined:
    report = SetReport()
    try:
        source = open_source(config)
    except SourceError as error:
        report.problems.append(Problem(config.path, str(error)))
        return Examined(report)
    usable = _look(source, row_check(config, data, environments), report, data)
    bad = report.remarks if data.bad_rows == "skip" else report.problems
    if report.bad > _SHOWN:
        bad.append(Problem(config.path, f"{report.bad - _SHOWN} more bad lines of {len(source)}"))
    if data.bad_rows == "skip" and report.bad:
        bad.append(Problem(config.path, f"{report.bad} of {len(source)} rows are left out (data.bad_rows=skip)"))
    if report.alike and report.rows > 1:
        report.remarks.append(Problem(config.path, f"has the same prompt in all of its {report.rows} rows"))
    elif report.duplicates:
        text = f"has {report.duplicates} rows, of {report.rows}, whose prompt an earlier row has too"
        report.remarks.append(Problem(config.path, text))
    return Examined(report, source, usable)


def row_check(config: DatasetConfig, data: DataConfig, environments: Mapping[str, str]) -> RowCheck:
    """What the rows of a set are looked at with."""
    names = {task: processor_name(data, task) for task in {*environments, config.task_name or data.task_name}}
    own = frozenset(task for task, name in names.items() if name is not None and name not in ROW_FORMS)
    return RowCheck(
        lambda task: task_spec(data, task),
        config.task_name or data.task_name,
        environments,
        lambda task: ROW_FORMS.get(names.get(task) or ""),
        own,
    )


def _look(source: Source, check: RowCheck, report: SetReport, data: DataConfig) -> NDArray[np.int64]:
    """Fill in the report; the numbers of the usable rows, [rows], int64."""
    usable: list[NDArray[np.int64]] = []
    digests: list[NDArray[np.uint64]] = []
    numbers: list[int] = []
    seen: list[int] = []
    bad = report.remarks if data.bad_rows == "skip" else report.problems
    for number, row in enumerate(source.each()):
        formed = row if isinstance(row, str) else check.in_form(row)
        if isinstance(formed, str):
            report.bad += 1
            if report.bad <= _SHOWN:
                bad.append(Problem(source.place(number), formed))
            continue
        numbers.append(number)
        _note(formed, check.task(formed), report)
        prompt = check.prompt(formed)
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        seen.append(xxh3_64_intdigest(text.encode(errors="surrogatepass")))
        if len(numbers) == _CHUNK:
            usable.append(np.array(numbers, dtype=np.int64))
            digests.append(np.array(seen, dtype=np.uint64))
            numbers, seen = [], []
    usable.append(np.array(numbers, dtype=np.int64))
    digests.append(np.array(seen, dtype=np.uint64))
    report.rows = sum(map(len, usable))
    distinct = len(np.unique(np.concatenate(digests)))
    report.alike, report.duplicates = distinct <= 1, report.rows - distinct
    return np.concatenate(usable)


def _note(row: Row, task: str, report: SetReport) -> None:
    """Note task and columns of a row."""
    report.tasks.add(task)
    columns = report.columns.setdefault(task, set())
    if not columns >= row.keys():
        columns.update(map(str, row))
