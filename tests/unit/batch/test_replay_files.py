"""The file of what a step computed: what is written is read again, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_grpo.batch import replay_files
from megatron_grpo.batch.replay_files import (
    StateFigure,
    StepFigures,
    TensorFigure,
    choose_watched_tokens,
    locate_figures_file,
    read_figures,
    write_figures,
)

FIGURES = StepFigures(
    loss=1 / 3,
    grad_norm=2.5,
    learning_rate=1e-6,
    tensors=[
        TensorFigure("weight", 0, "model.norm.weight", 1 / 7, [0.1, -0.2]),
        TensorFigure("gradient", 1, "lm_head.weight", 0.0, [0.0, 0.0]),
    ],
    states=[StateFigure("layers.0.mlp", 12, [0.5, -0.25]), StateFigure("norm", 3, [1.0])],
    config={"policy": {"precision": "float32"}},
    device="cpu",
)


def test_every_figure_survives(tmp_path: Path) -> None:
    file = locate_figures_file(tmp_path, 7)
    assert read_figures(file) is None
    write_figures(file, FIGURES)
    assert read_figures(file) == FIGURES
    assert [entry.name for entry in file.parent.iterdir()] == ["step_7.parquet"]
    assert FIGURES.versions["torch"], "versions of the libraries are recorded"
    write_figures(file, replace(FIGURES, tensors=[]))
    assert read_figures(file) == replace(FIGURES, tensors=[])


def test_a_file_of_an_earlier_version_has_no_hidden_states(tmp_path: Path) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_figures(file, replace(FIGURES, states=[]))
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["token"]), file)
    assert read_figures(file) == replace(FIGURES, states=[])


def write_table(file: Path, metadata: dict[str, Any], **columns: list[Any]) -> None:
    plain = {
        "kind": ["weight"],
        "optimizer_step": [0],
        "name": ["w"],
        "norm": [1.0],
        "token": [None],
        "sketch": [[0.0]],
    }
    write_figures(file, FIGURES)
    schema = pq.read_schema(file).with_metadata({b"megatron_grpo.replay": json.dumps(metadata).encode()})
    names = {name: values for name, values in {**plain, **columns}.items() if values}
    types = [
        schema.field(name) if name not in columns else pa.field(name, pa.array(columns[name]).type) for name in names
    ]
    pq.write_table(pa.table(names, schema=pa.schema(types, metadata=schema.metadata)), file)


METADATA = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "config": {}, "device": "cpu", "versions": {}}


@pytest.mark.parametrize(
    ("metadata", "columns", "text"),
    [
        ({"config": "x"}, {}, "config"),
        ({"config": [1]}, {}, "config"),
        ({"loss": "x"}, {}, "loss"),
        ({"versions": {"torch": [1]}}, {}, "versions"),
        ({"config": json.loads("[" * 300 + "]" * 300)}, {}, "more than 100 levels"),
        ({}, {"kind": ["state"]}, "kind"),
        ({}, {"norm": ["1"]}, "its column norm is string, not double"),
        ({}, {"sketch": [["0"]]}, "its column sketch is list"),
        ({}, {"name": []}, "it has no column name"),
        ({}, {"kind": ["hidden state"]}, "token"),
    ],
)
def test_a_forged_file_is_refused(
    metadata: dict[str, Any], columns: dict[str, list[Any]], text: str, tmp_path: Path
) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_table(file, METADATA)
    assert read_figures(file) is not None
    write_table(file, METADATA | metadata, **columns)
    with pytest.raises(ValueError, match=rf"step_7\.parquet is damaged, or was written by another version: .*{text}"):
        read_figures(file)


def test_more_figures_than_a_run_writes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_figures(file, FIGURES)
    monkeypatch.setattr(replay_files, "_MOST_ROWS", 3)
    with pytest.raises(ValueError, match="it has 4 rows, and at most 3 are read"):
        read_figures(file)


def test_the_watched_tokens_are_different_tokens_of_the_step() -> None:
    assert choose_watched_tokens(5).tolist() == [0, 1, 2, 3, 4]
    watched = choose_watched_tokens(2_000_000).tolist()
    assert len(watched) == len(set(watched)) == 32
    assert watched == sorted(watched) == choose_watched_tokens(2_000_000).tolist()
    assert watched[0] < 500_000 < 1_500_000 < watched[-1] < 2_000_000


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_figures(file, FIGURES)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step_7.parquet is damaged, or was written by another version"):
        read_figures(file)
