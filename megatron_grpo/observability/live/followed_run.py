"""A run that is followed: its state for the page and the terminal, from its files, as they grow."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.batch.rollout_files import (
    ROLLOUTS_FOLDER,
    ROWS_FOLDER,
    VALIDATION_FOLDER,
    find_recorded_steps,
    read_rows,
)
from megatron_grpo.config.outside_files import read_json
from megatron_grpo.observability import run_files
from megatron_grpo.observability.alarms import read_alarms
from megatron_grpo.observability.live.series import METRICS, SeriesFile
from megatron_grpo.observability.page.thumbnails import add_images
from megatron_grpo.observability.page.trajectories import (
    TokenBytes,
    load_token_bytes,
    make_step_table,
    make_token_table,
)
from megatron_grpo.observability.page.write import describe_run, read_config, require_run_folder

MOST_NEW_ROWS = 400  # rows since the last answer that are sent by themselves; with more, all columns are sent anew
TABLE_ROWS, TABLE_TOKENS, TABLE_FULL_TOKENS = 4096, 4_000_000, 300_000  # most of a step's table
TABLE_CHARACTERS = 2_000_000
PROMPT_ROWS = 400  # most rollouts of one prompt
SEARCH_S = 3.0  # most seconds that rollouts of a prompt are looked for
LATEST_ALARMS = 50
_KEPT_TABLES = 4
SOURCES = ("training", "validation")
GROUPS = (METRICS, *run_files.CLOCK_FIGURES)


class FollowedRun:
    """The files of a run, read as they grow."""

    def __init__(self, folder: Path, is_live: Callable[[Path], bool]) -> None:
        """ValueError: the folder is not a run's."""
        require_run_folder(folder)
        self.folder = folder
        self._is_live = is_live
        self.steps = SeriesFile(folder / run_files.METRICS_FILE)
        self.validations = SeriesFile(folder / run_files.VALIDATION_FILE)
        self._vocabulary: TokenBytes | None = None
        self._remark: str | None = None
        self._model: str | None = None
        self._description: dict[str, Any] = {}
        self._described_at: list[int] | None = None  # times of the files that it was read from
        self._tables: OrderedDict[tuple[str, int, int], dict[str, Any]] = OrderedDict()

    def refresh(self) -> None:
        """Read what the run has written since the last time."""
        self.steps.read_more()
        self.validations.read_more()

    def describe(self) -> dict[str, Any]:
        """Describe the run without its figures: name, settings, starts, summary, alarms."""
        files = (run_files.CONFIG_FILE, run_files.STARTS_FILE, run_files.SUMMARY_FILE)
        changed = [_read_time(self.folder / name) for name in files]
        if changed != self._described_at:
            self._load_vocabulary()
            settings = {"remark": self._remark, "devices": _count_devices(read_config(self.folder))}
            self._description, self._described_at = describe_run(self.folder) | settings, changed
        alarms = read_alarms(self.folder)[-LATEST_ALARMS:]
        return self._description | {"alarms": alarms, "is_live": self._is_live(self.folder)}

    def select_news(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Select the steps and events that the page lacks.

        `answer`: `known` of the last answer, which the page sends back. If a file was written anew or much is new, all
        figures are sent, thinned.
        """
        self.refresh()
        files, description = (self.steps, self.validations), self.describe()
        tables = {source: self._list_steps(source) for source in SOURCES}
        digest = hashlib.sha256(format_json(description).encode()).hexdigest()[:16]
        counts = [len(files[0].steps), len(files[1].steps), *(len(steps) for _, steps in tables.values())]
        versions = [file.version for file in files]
        earlier = _read_numbers(answer, "counts", len(counts))
        is_known = _read_numbers(answer, "versions", len(versions)) == versions
        is_known = is_known and all(0 <= now - then <= MOST_NEW_ROWS for now, then in zip(counts, earlier, strict=True))
        after = earlier if is_known else [0] * len(counts)
        figures = {group: self.steps.select_columns(group, after[0]) for group in GROUPS}
        figures["validation"] = self.validations.select_columns(METRICS, after[1])
        table_news = {
            source: {"kind": kind, "steps": steps[then:]}
            for (source, (kind, steps)), then in zip(tables.items(), after[2:], strict=True)
        }
        return {
            "description": None if digest == answer.get("digest") else description,
            "figures": figures,
            "tables": table_news,
            "is_whole": not is_known,
            "known": {"digest": digest, "versions": versions, "counts": counts},
        }

    def choose_kind(self, source: str) -> str:
        """Choose the folder of rollouts of training, or of validations."""
        if source == "validation":
            return VALIDATION_FOLDER
        return ROWS_FOLDER if find_recorded_steps(self.folder / ROWS_FOLDER) else ROLLOUTS_FOLDER

    def make_table(self, source: str, step: int) -> dict[str, Any]:
        """Make the table of a step's rollouts, with `texts` of its tokens.

        LookupError: it has none; ValueError: its file is damaged.
        """
        kind = self.choose_kind(source)
        file = find_recorded_steps(self.folder / kind)[step]
        key = (source, step, os.stat(file).st_mtime_ns)
        if key not in self._tables:
            self._load_vocabulary()
            rows = _take_rows(step, file)
            table = make_step_table(rows, kind, self._vocabulary, TABLE_FULL_TOKENS, TABLE_CHARACTERS)
            table = add_images(table, rows, self.folder, TABLE_CHARACTERS)
            self._tables[key] = self._add_texts(table)
            if len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
        return self._tables[key]

    def find_prompt(self, source: str, prompt: int) -> dict[str, Any]:
        """Find the rollouts of a prompt: a table for each step.

        `read` of `steps` steps were looked through. The latest steps are read first, for at most SEARCH_S seconds.
        """
        kind, end, count, tables, steps_read = self.choose_kind(source), time.monotonic() + SEARCH_S, 0, {}, 0
        self._load_vocabulary()
        files = find_recorded_steps(self.folder / kind)
        for step in reversed(files):
            if time.monotonic() > end or count >= PROMPT_ROWS:
                break
            steps_read += 1
            if not _has_prompt(files[step], prompt):
                continue
            rows = [row for row in read_rows(step, files[step]) if row["prompt_idx"] == prompt]
            count += len(rows)
            full, characters = TABLE_FULL_TOKENS // 20, TABLE_CHARACTERS // 20
            table = make_step_table(rows, kind, self._vocabulary, full, characters)
            tables[step] = self._add_texts(add_images(table, rows, self.folder, characters))
        return {"tables": dict(sorted(tables.items())), "read": steps_read, "steps": len(files)}

    def _add_texts(self, table: dict[str, Any]) -> dict[str, Any]:
        token_ids = {token_id for trajectory in table["full"].values() for token_id in trajectory.get("ids", ())}
        return table | {"texts": make_token_table(self._vocabulary, token_ids)}

    def _list_steps(self, source: str) -> tuple[str, list[int]]:
        kind = self.choose_kind(source)
        return kind, list(find_recorded_steps(self.folder / kind))

    def _load_vocabulary(self) -> None:
        model = read_config(self.folder).get("policy.model.path")
        if model == self._model or not isinstance(model, str):
            return
        self._model, reason = model, f"the tokenizer of {model} is not on this machine"
        try:
            self._vocabulary = load_token_bytes(model)
        except ValueError as error:
            reason = str(error)
        self._remark = None if self._vocabulary else f"Responses are shown as text, not as tokens: {reason}."


def _read_numbers(answer: Mapping[str, Any], name: str, count: int) -> list[int]:
    """Read numbers that a page sends back; -1 for each if it sends others."""
    numbers = answer.get(name)
    is_valid = isinstance(numbers, list) and len(numbers) == count and all(type(number) is int for number in numbers)
    return list(numbers) if is_valid and isinstance(numbers, list) else [-1] * count


def _read_time(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _take_rows(step: int, file: Path) -> list[dict[str, Any]]:
    rows, tokens = [], TABLE_TOKENS
    for row in read_rows(step, file):
        rows.append(row)
        tokens -= len(row["token_ids"])
        if len(rows) == TABLE_ROWS or tokens <= 0:
            break
    return rows


def _has_prompt(file: Path, prompt: int) -> bool:
    """True if a file has rollouts of a prompt; only one column is read."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        column = pq.read_table(file, columns=["prompt_idx"])["prompt_idx"]
    except (pa.ArrowException, OSError, LookupError):
        return False
    return bool(pc.any(pc.equal(column, prompt)).as_py())


def _count_devices(settings: dict[str, Any]) -> int:
    """Count the GPUs of a run; 0: none, or not recorded."""
    nodes, gpus = settings.get("cluster.num_nodes", 1), settings.get("cluster.gpus_per_node")
    return nodes * gpus if isinstance(nodes, int) and isinstance(gpus, int) else 0


def format_json(value: Any) -> str:
    """Format as JSON; numbers that are not finite become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(run_files.replace_non_finite(value), separators=(",", ":"), allow_nan=False)


def read_outcome(folder: Path) -> dict[str, Any]:
    """Read the summary of a run that has ended; empty: it has none."""
    try:
        summary = read_json(folder / run_files.SUMMARY_FILE)
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
