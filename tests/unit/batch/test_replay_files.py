"""The file of what a step computed: what is written is read again, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

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
