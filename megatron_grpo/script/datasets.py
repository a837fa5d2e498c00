"""Datasets that a script gives, kept as files in the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.script.names import check_name


def data_overrides(folder: Path, training: Any, validation: Any, rewarded: bool) -> list[str]:
    """Where the datasets are, once those that are objects are written into the folder."""
    written = []
    columns: set[str] = set()
    if training is not None:
        path, columns = _kept(training, folder / "train", "train_dataset")
        written.append(f"data.train_path={path}")
    if isinstance(validation, Mapping):
        for name, one in validation.items():
            check_name(name, "val_dataset", "data.val_sets")
            path, _ = _kept(one, folder / f"val_{name}", f"val_dataset[{name!r}]")
            written.append(f"data.val_sets.{name}.path={path}")
        written.append("data.val_path=null")
    elif validation is not None:
        written.append(f"data.val_path={_kept(validation, folder / 'val', 'val_dataset')[0]}")
    elif training is not None:
        written.append("data.val_path=null")  # the recipe's held-out rows are of its own task
    if rewarded and columns and "answer" not in columns:
        written.append("data.answer_key=null")
    return written


def _kept(dataset: Any, path: Path, subject: str) -> tuple[str, set[str]]:
    """The path of a dataset, written there if it is an object, and the names of its columns as far as they are known.

    Raises:
        ConfigError: it is nothing that has rows, or a row is nothing that JSON can hold.
    """
    if isinstance(dataset, str | Path):
        return str(dataset), set()
    if isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset):
        file = path.with_suffix(".jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (_line(row, f"{subject}[{number}]") for number, row in enumerate(dataset))
        file.write_text("".join(lines), encoding="utf-8")
        return str(file), {str(column) for row in dataset for column in row}
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "to_parquet"):
        text = (
            f"is {type(dataset).__name__}; give a list of dicts, a datasets.Dataset, or a path or hub name (of a large "
            "hub set with data.streaming=true)"
        )
        raise ConfigError([Problem(subject, text)])
    file = path.with_suffix(".parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    dataset.to_parquet(str(file))
    return str(file), set(dataset.column_names)


def _line(row: dict[Any, Any], subject: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        text = f"cannot be kept as JSON: {error}; give numbers, texts, lists and dicts, or a datasets.Dataset"
        raise ConfigError([Problem(subject, text)]) from None
