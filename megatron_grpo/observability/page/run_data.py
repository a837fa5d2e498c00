"""What a run's folder says of the run, in columns: its curves, how it ended, its configuration and its starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.config.changes import leaves
from megatron_grpo.config.schema import Config
from megatron_grpo.observability.json_files import read_lines
from megatron_grpo.observability.run_files import METRICS_FILE, STARTS_FILE, VALIDATION_FILE
from megatron_grpo.observability.summary import SUMMARY_FILE

CONFIG_FILE = "config.yaml"
_APART = ("timing", "throughput")
"""Groups of figures that a line has beside its metrics: of metrics.jsonl both, of validation.jsonl the first."""


def run_data(folder: Path) -> dict[str, Any]:
    """Everything but the trajectories, in types that JSON has.

    Raises:
        ValueError: the folder is not that of a run, or a line in it is damaged; the text names it.
    """
    if not (folder / METRICS_FILE).exists() and not (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} is not the folder of a run: it has neither {METRICS_FILE} nor {CONFIG_FILE}")
    steps = _rows(folder / METRICS_FILE)
    return {
        "name": folder.resolve().name,
        "summary": _summary(folder),
        "metrics": columns([_metrics(row) for row in steps]),
        **{group: columns([{"step": row["step"], **row.get(group, {})} for row in steps]) for group in _APART},
        "validation": columns([_metrics(row) for row in _rows(folder / VALIDATION_FILE)]),
        "config": _settings(folder),
        "starts": read_lines(folder / STARTS_FILE),
    }


def _rows(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of figures, each with its step.

    Raises:
        ValueError: a line is none of figures; the text names file and line.
    """
    rows = read_lines(file)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{file}:{number} is damaged: it has no number under step")
        for group in _APART:
            if not isinstance(row.get(group, {}), dict):
                raise ValueError(f"{file}:{number} is damaged: {group} is {type(row[group]).__name__}, and no object")
    return rows


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of a run; empty where there is none that can be read."""
    try:
        values = yaml.safe_load((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of numbers as a list for each name that any of them has; None where a row does not."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _APART}


def _settings(folder: Path) -> list[tuple[str, str, str | None]]:
    """Key, value and, where it is another, the default of every setting, as texts."""
    defaults = dict(leaves(asdict(Config())))
    return [
        (key, _text(value), _text(defaults[key]) if key in defaults and defaults[key] != value else None)
        for key, value in leaves(config_of(folder))
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}
