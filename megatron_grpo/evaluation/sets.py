"""Which sets of prompts an evaluation answers, by the names that their figures have."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sources import is_remote
from megatron_grpo.preflight.prompt_files import report_of_rows

DATA_KEY = "data.val_path"


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """A set of prompts."""

    key: str
    """The key that its path was given under."""
    rows: DatasetConfig

    @property
    def subject(self) -> str:
        """Key and path, for messages."""
        return f"{self.key}={self.rows.path}"


def evaluated_sets(config: Config, given: Sequence[str]) -> dict[str, EvaluatedSet]:
    """The sets by name.

    Args:
        config: has the validation sets, and the split of those that have splits.
        given: paths or hub names on the command line; empty: all validation sets of the configuration.
    """
    data = config.data
    if given:
        rows = [
            DatasetConfig(path=os.path.expanduser(path), subset=data.subset, split=data.val_split) for path in given
        ]
        sets = [EvaluatedSet(DATA_KEY, one) for one in rows]
    else:
        sets = [EvaluatedSet(key, one) for key, one in data.validation.items()]
    names = list(map(_name, sets))
    return {
        (name if names.count(name) == 1 or one.key != DATA_KEY else one.rows.path): one
        for name, one in zip(names, sets, strict=True)
    }


def set_problems(config: Config, sets: dict[str, EvaluatedSet]) -> Iterator[Problem]:
    """What is wrong with the sets, row by row; with none at all, that there is none."""
    if not sets:
        text = "is missing: a file, a folder, a hub name, or [file,file], with the prompts to respond to"
        yield Problem(DATA_KEY, text)
    for one in sets.values():
        report = report_of_rows(config, one.subject, one.rows)
        for problem in report.problems:  # of single rows they name the line, and of the whole set its path
            yield Problem(one.subject, problem.text) if problem.subject == one.rows.path else problem
        if not report.problems and not report.rows:
            yield Problem(one.subject, "has no rows")


def _name(one: EvaluatedSet) -> str:
    """The NAME of data.val_sets.NAME; else the last part of the path, of a file without its suffix."""
    path = one.rows.path
    if one.key != DATA_KEY:
        return one.key.split(".")[2]
    return Path(path).name if is_remote(path) or os.path.isdir(path) else Path(path).stem
