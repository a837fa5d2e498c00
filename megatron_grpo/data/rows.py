"""The report on a set of rows: rows that cannot be used, and a summary of the rest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.data_schema import LABELLED, SUPERVISED, DataConfig, DatasetConfig
from megatron_grpo.config.errors import Problem, format_count, to_text
from megatron_grpo.config.schema import Config
from megatron_grpo.data.chat_messages import are_turns, has_text, is_conversation, read_row_tools
from megatron_grpo.data.code_tests import parse_code_tests, prepare_tests
from megatron_grpo.data.image_rows import place_images, read_images, show_images
from megatron_grpo.data.math_text import is_unreadable, rewrite_numbers
from megatron_grpo.data.processors import TaskDataSpec, find_task
from megatron_grpo.data.recorded_rows import RECORDED, RecordedRows, RecordedSequence
from megatron_grpo.data.sources import Row, Source, open_source
from megatron_grpo.data.specs import ROW_FORMS, find_processor_name, make_task_spec, parse_countdown_game
from megatron_grpo.data.supervised_rows import (
    describe_missing_column,
    find_label_problem,
    find_pair_problem,
    find_row_problem,
    list_image_columns,
)
from megatron_grpo.models.image_store import digest_image, inspect_image

# Beginning of a list of messages as JSON and Python write it.
_WRITTEN_MESSAGES = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from|value)\1\s*:")
# Kinds of rows that have the responses to learn from.
_LEARNT = {algorithm.rows for algorithm in ALGORITHMS.values() if algorithm.rows}
_MAX_REPORTED = 5  # mistakes in the rows of one set that are reported one by one

# Oddities of usable rows, as they stand after "whose" in a remark.
_REPEATED = "prompt repeats that of an earlier row"
_BEGUN = "prompt ends with a message of the assistant: responses go on from it; leave out an answer to learn from"
_DOUBTFUL = "tests cannot be trusted (docs/environments.md)"  # a program may pass them undeservedly, or cannot pass
_UNREAD = "answer cannot be read as mathematics, so that only the same text equals it"
_ODDITIES = (_REPEATED, _BEGUN, _DOUBTFUL, _UNREAD)
_reports: dict[str, SetReport] = {}  # the checks before a run and the run itself both need them


@dataclass(slots=True)
class SetReport:
    """A set of rows with its summary; the counts are of usable rows."""

    source: Source | RecordedRows | None = None  # None: it cannot be read
    usable: array[int] = field(default_factory=lambda: array("q"))  # indices of the usable rows in the source
    digest: str = ""
    """Digest of the content (XXH3, 128 bits): of the bytes of a file, of the rows of a folder or hub set."""
    rows: int = 0
    duplicates: int = 0  # rows that repeat the prompt of an earlier row
    columns: dict[str, set[str]] = field(default_factory=dict)
    """Columns of each task's rows, after the conversion by data.processor."""
    common_columns: dict[str, set[str]] = field(default_factory=dict)  # columns that all rows of a task have
    bad_count: int = 0  # rows that cannot be used
    problems: list[Problem] = field(default_factory=list)
    """Problems of the set, and of rows under their file:line; with data.bad_rows=skip only those of the set."""
    remarks: list[Problem] = field(default_factory=list)  # remarks for the user, with the skipped rows

    def explain_left_out(self) -> list[str]:
        """Explain why rows are left out, by the first one; empty if none are."""
        if not self.bad_count or not self.remarks:
            return []
        first = self.remarks[0]
        return [f"{format_count('row', self.bad_count)} left out (data.bad_rows=skip): {first.subject} {first.text}"]


def join_reasons(text: str, reasons: Sequence[str]) -> str:
    """Add reasons to a message, in parentheses."""
    return f"{text} ({'; '.join(reasons)})" if reasons else text


def describe_too_few_rows(config: Config, count: str) -> str:
    """Say that a set has fewer rows than a batch needs."""
    text = f"has {count}, fewer than the {config.prompts_per_generation_batch} prompts of a batch"
    return f"{text}; add rows or lower {config.loop_name}.num_prompts_per_step"


def find_row_kinds(config: Config, *, trains: bool) -> dict[str, str]:
    """Find the required kind of each task's rows, for training or sampling.

    The kind is the type of the environment that scores the responses, or that of the rows to learn from.
    """
    kind = config.row_kind if trains else None
    return {name: kind or environment.type for name, environment in config.env.items()}


def examine_set(config: DatasetConfig, data: DataConfig, environments: Mapping[str, str]) -> SetReport:
    """Read and check every row of a set, once.

    `environments`: type of each environment, by task name.
    """
    # All rows are checked before training, although training may need few of them: a bad row that shows only when it is
    # used ends a run that has taken hours of GPUs, and the number of usable rows decides the steps of an epoch, the
    # schedules of the learning rate and the order of prompts, which must not change while the run goes on.
    path = config.path
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names] or [path]
    stats = []
    for file in sorted(files):
        try:
            status = os.stat(file)
        except (OSError, ValueError):  # a hub set; ValueError: the path has a NUL character
            continue
        stats.append((file, status.st_mtime_ns, status.st_size, status.st_ino))
    identity = json.dumps([asdict(config), asdict(data), dict(environments), stats], default=str)
    if identity not in _reports:
        _reports[identity] = _examine(config, data, environments)
    return _reports[identity]


def _examine(config: DatasetConfig, data: DataConfig, environments: Mapping[str, str]) -> SetReport:
    report = SetReport()
    try:
        is_recorded = config.path == data.from_rollouts
        source: Source | RecordedRows
        source = RecordedRows(data) if is_recorded else open_source(config, data.reasoning_gym)
    except ValueError as error:
        report.problems.append(Problem(config.path, str(error)))
        return report
    report.source, check = source, RowCheck(config, data, environments)
    report.problems += [Problem(config.path, text) for text in check.find_media_problems(source.media)]
    if report.problems:
        return report
    oddities = _check_rows(source, check, report, data)
    if os.path.isfile(config.path):
        report.digest = digest_file(config.path)
    messages = report.remarks if data.bad_rows == "skip" else report.problems
    if data.bad_rows == "skip" and report.bad_count:
        messages.append(Problem(config.path, f"{report.bad_count} of {len(source)} rows left out (data.bad_rows=skip)"))
    report.remarks += [Problem(config.path, text) for text in oddities]
    return report


def _check_rows(source: Source | RecordedRows, check: RowCheck, report: SetReport, data: DataConfig) -> list[str]:
    """Fill a report; returns remarks about usable rows that look odd."""
    digests = array("Q")
    oddities, details = Counter[str](), dict[str, str]()
    # A file is identified by its bytes, which is faster; other sets by their rows, whose split into files may differ.
    content = None if os.path.isfile(source.name) else xxh3_128()
    mistakes = dict[str, list[int]]()  # by text, the first row that has it and the number of rows
    for number, row in enumerate(source.read_all()):
        if content is not None:
            content.update(_convert_to_bytes(row))
        converted = row if isinstance(row, str) else check.convert(row)
        if isinstance(converted, str):
            report.bad_count += 1
            if converted in mistakes or len(mistakes) < _MAX_REPORTED:
                mistakes.setdefault(converted, [number, 0])[1] += 1
            continue
        report.usable.append(number)
        task = find_task(converted, check.default_task)
        columns = report.columns.setdefault(task, set())
        if not columns >= converted.keys():
            columns.update(map(str, converted))
        report.common_columns.setdefault(task, {*columns}).intersection_update(converted)
        for oddity, detail in check.find_oddities(task, converted):
            oddities[oddity] += 1
            if detail:
                details.setdefault(oddity, f": the first is {source.locate(number)}, {detail}")
        # Only a digest of each prompt stays in memory, so that sets of any size can be checked for repetitions.
        prompt = check.read_prompt(task, converted)
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        digests.append(xxh3_64_intdigest(text.encode(errors="surrogatepass")))
    messages = report.remarks if data.bad_rows == "skip" else report.problems
    report.rows = len(report.usable)
    messages += _describe_mistakes(source, mistakes, report)
    report.duplicates = report.rows - len(np.unique(np.array(digests, dtype=np.uint64)))
    report.digest = "" if content is None else content.hexdigest()
    if report.duplicates:
        oddities[_REPEATED] = report.duplicates
    remarks = [
        f"has {oddities[oddity]} rows, of {report.rows}, whose {oddity}{details.get(oddity, '')}"
        for oddity in _ODDITIES
        if oddities[oddity]
    ]
    if 0 < report.duplicates == report.rows - 1:
        remarks[0] = f"has the same prompt in all of its {report.rows} rows"
    return remarks


def _describe_mistakes(
    source: Source | RecordedRows, mistakes: Mapping[str, list[int]], report: SetReport
) -> Iterator[Problem]:
    bad_count = report.bad_count
    for text, (first, count) in mistakes.items():
        if report.rows == 0 and count == bad_count > 1:
            yield Problem(source.name, f"{text} (as in all of its {bad_count} rows)")
            return
        alike = f"; {format_count('other row', count - 1)} too" if count > 1 else ""
        yield Problem(source.locate(first), text + alike)
    unnamed = bad_count - sum(count for _, count in mistakes.values())
    if unnamed:
        yield Problem(source.name, f"{unnamed} more bad lines of {len(source)}")


def digest_file(path: str) -> str:
    """Digest the bytes of a file (XXH3, 128 bits)."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def digest_rows(rows: Iterable[Row]) -> str:
    """Digest the content of rows (XXH3, 128 bits)."""
    digest = xxh3_128()
    for row in rows:
        digest.update(_convert_to_bytes(row))
    return digest.hexdigest()


def _convert_to_bytes(row: Row | str) -> bytes:
    def convert(value: Any) -> str:
        if isinstance(value, RecordedSequence):
            value = value.token_ids.tobytes() + str(value.spans).encode()
        return xxh3_128(value).hexdigest() if isinstance(value, bytes) else str(value)

    return json.dumps(row, sort_keys=True, default=convert).encode()


class RowCheck:
    """Checks rows; the type of a row's environment decides what its answer may be."""

    def __init__(self, config: DatasetConfig, data: DataConfig, environments: Mapping[str, str]) -> None:
        self.default_task = config.task_name or data.task_name
        self._environments = environments
        names = {task: find_processor_name(data, task) for task in {*environments, self.default_task}}
        self._forms = {task: ROW_FORMS[name] for task, name in names.items() if name in ROW_FORMS}
        # Tasks whose rows only a user's processor understands.
        self._opaque = {task for task, name in names.items() if name is not None and name not in ROW_FORMS}
        self._load_spec = cache(partial(make_task_spec, data))
        self._image_key, self._most_images = data.image_key, data.max_images
        self._folder = Path(config.path) if os.path.isdir(config.path) else Path(config.path).parent

    def find_media_problems(self, media: Mapping[str, str]) -> Iterator[str]:
        """Find prompts or answers that are audio, images or video."""
        if self.default_task in self._opaque or self.default_task in self._forms:
            return  # their rows' columns have other names
        spec = self._load_spec(self.default_task)
        is_supervised = self._environments.get(self.default_task) in _LEARNT
        second = ("response_key", spec.response_key) if is_supervised else ("answer_key", spec.answer_key)
        for setting, column in (("prompt_key", spec.prompt_key), second):
            if column is not None and column in media:
                yield f"column {column!r} (data.{setting}) holds {media[column]} data; name a column of texts"

    def convert(self, row: Row) -> Row | str:
        """Convert a row to its task's form, or say why not."""
        if RECORDED in row:
            return row
        task = find_task(row, self.default_task)
        if not isinstance(task, str) or task not in self._environments:
            # Columns are checked first: after a mistyped path they tell more about the file than the task does.
            is_opaque = self.default_task in self._opaque or not _LEARNT.isdisjoint(self._environments.values())
            missing = None if is_opaque else _find_missing_column(row, self._load_spec(self.default_task))
            names = ", ".join(sorted(self._environments))
            return missing or f"task_name {task!r} is not an environment; env has {names}"
        if task in self._opaque:
            return row
        if task in self._forms:
            try:
                row = self._forms[task](row)
            except ValueError as error:
                return f"is not of the form of data.processor: {error}"
        spec = self._load_spec(task)
        try:
            if spec.apply_chat_template:
                read_row_tools(row)
        except ValueError as error:
            return str(error)
        displayed = row
        if self._image_key is not None:
            displayed = {**row, **{name: show_images(row[name]) for name in list_image_columns(row, spec)}}
            try:
                for name in list_image_columns(row, spec):
                    self._check_images(row, name)
            except ValueError as error:
                return f"column {self._image_key!r} (data.image_key): {error}"
        return _find_row_problem(displayed, spec, task, self._environments[task]) or row

    def _check_images(self, row: Row, column: str) -> None:
        """ValueError: an image of a column's messages is missing, damaged or without a place."""
        assert self._image_key is not None
        if not (isinstance(row[column], str) or are_turns(row[column])):
            return  # the check of the columns says so
        images = read_images(row.get(self._image_key), self._folder)
        _, images = place_images(row[column], images, self._folder)
        if len(images) > self._most_images:
            raise ValueError(f"the prompt has {len(images)} images, more than data.max_images={self._most_images}")
        for number, image in enumerate(images, start=1):
            try:
                inspect_image(image)
            except ValueError as error:
                raise ValueError(f"image {number} {error}") from None

    def read_prompt(self, task: str, row: Row) -> Any:
        """Read a converted row's prompt; the row itself if only a user's processor knows."""
        spec = self._load_spec(task)
        is_whole = task in self._opaque or RECORDED in row or spec.prompt_key not in row  # pairs may lack a prompt
        if is_whole or self._image_key is None:
            return row if is_whole else row[spec.prompt_key]
        images = read_images(row.get(self._image_key), self._folder)
        return [row[spec.prompt_key], *map(digest_image, images)]

    def find_oddities(self, task: str, row: Row) -> Iterator[tuple[str, str]]:
        """Find which of _ODDITIES a converted row has, with details."""
        if self._environments[task] in _LEARNT:
            return
        prompt = self.read_prompt(task, row)
        if is_conversation(prompt) and prompt[-1]["role"] == "assistant":
            yield _BEGUN, ""
        answer_key = None if task in self._opaque else self._load_spec(task).answer_key
        if answer_key is None:
            return
        answer, kind = row[answer_key], self._environments[task]
        if kind == "code":
            tests = tuple(test for test in parse_code_tests(answer) if isinstance(test, str))
            if tests and (doubts := prepare_tests(tests).doubts):
                yield _DOUBTFUL, f"whose tests {doubts[0]}"
        elif kind == "math" and is_unreadable(str(answer)):
            yield _UNREAD, to_text(str(answer))


def _find_row_problem(row: Row, spec: TaskDataSpec, task: str, kind: str) -> str | None:
    if kind in _LEARNT:
        checks = {SUPERVISED: find_row_problem, LABELLED: find_label_problem}
        return checks.get(kind, find_pair_problem)(row, spec)
    missing = _find_missing_column(row, spec)
    if missing is not None:
        return missing
    prompt = row[spec.prompt_key]
    if isinstance(prompt, list) and not spec.apply_chat_template:
        return f"column {spec.prompt_key!r} is a list of messages, which needs data.apply_chat_template=true"
    if not ((isinstance(prompt, str) and prompt) or is_conversation(prompt)):
        for number, turn in enumerate(prompt if are_turns(prompt) else [], start=1):
            if not has_text(turn):
                content = turn["content"]
                form = "a list of parts" if isinstance(content, list) else type(content).__name__
                text = f"whose content is {'null' if content is None else form}; it must be text"
                return f"column {spec.prompt_key!r} has a message (number {number}) {text}"
        return f"column {spec.prompt_key!r} is neither a text nor a list of {{role, content}} messages"
    if isinstance(prompt, str) and spec.apply_chat_template and _WRITTEN_MESSAGES.match(prompt):
        text = "is a list of messages written as text, which the model would see with its brackets"
        advice = "write the list itself (JSONL or Parquet; a table of text cannot hold it)"
        return f"column {spec.prompt_key!r} {text}; {advice}"
    if kind == "countdown":
        try:
            parse_countdown_game(row)
        except ValueError as error:
            return str(error)
    if spec.answer_key is None:
        return None
    problem = find_answer_problem(kind, row[spec.answer_key])
    answer = to_text(json.dumps(row[spec.answer_key], default=str))
    if problem is None:
        return None
    return f"column {spec.answer_key!r} (data.answer_key) {problem}: {answer} (env.{task}.type={kind} compares with it)"


def _find_missing_column(row: Row, spec: TaskDataSpec) -> str | None:
    for setting, column in (("prompt_key", spec.prompt_key), ("answer_key", spec.answer_key)):
        if column is not None and column not in row:
            return describe_missing_column(row, setting, column)
    if spec.answer_key is not None and row[spec.answer_key] is None:
        return f"column {spec.answer_key!r} (data.answer_key) is null; every prompt needs a reference answer"
    return None


def find_answer_problem(kind: str, answer: Any) -> str | None:
    """Find why no response can equal a reference answer; `kind`: type of the environment."""
    check = {"math": _check_math, "addition": _check_addition, "code": _check_code}.get(kind)
    return None if check is None else check(answer)


def _check_math(answer: Any) -> str | None:
    if isinstance(answer, bool | list | dict):
        kind = {bool: "boolean", list: "array", dict: "object"}[type(answer)]
        return f"is a JSON {kind}, and a response is text; write the answer as text"
    if isinstance(answer, float) and not math.isfinite(answer):
        return "is not a number that can be compared; write the answer as text"
    if isinstance(answer, float) and "e" in rewrite_numbers(repr(answer)):
        return f"becomes the text {answer!r}, which is not read as a number; write the answer as text"
    return "is empty" if isinstance(answer, str) and not answer.strip() else None


def _check_addition(answer: Any) -> str | None:
    is_digits = isinstance(answer, str) and answer.isascii() and answer.isdigit()
    is_sum = isinstance(answer, int) and not isinstance(answer, bool) and answer >= 0
    return None if is_digits or is_sum else "is not the digits of a sum, and a response has to be exactly that"


def _check_code(answer: Any) -> str | None:
    try:
        tests = parse_code_tests(answer)
        python = prepare_tests(tuple(test for test in tests if isinstance(test, str)))
    except ValueError as error:
        return str(error)
    if not tests:
        return "is empty"
    if isinstance(tests[0], str) and not python.test_count:
        return "only imports and defines; a test has to call what it defines, as check(f) does"
    return None
