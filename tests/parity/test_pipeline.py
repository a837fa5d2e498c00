"""Pipelines: interleaved, and with stages of unequal depth; and more tensor-parallel ranks than key/value heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_training import load_on_rank, save_on_rank
from tests.parity.training import merged
from tests.support.tiny_models import TinyModel, make_tiny_model

INTERLEAVED = Layout(pipeline=2, virtual_pipeline=2, count_loss=True)
"""Seven layers in chunks of 2 and 2 on one rank, 2 and 1 on the other."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("qwen3_deep", tmp_path_factory.mktemp("deep"))


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "layout",
    [
        INTERLEAVED,
        replace(INTERLEAVED, tensor=2, sequence=True),
        replace(INTERLEAVED, context=2),
        Layout(pipeline=2, first_stage_layers=3),
        Layout(pipeline=2, last_stage_layers=2),
    ],
    ids=str,
)
def test_gradients_equal_transformers(layout: Layout, packing: bool, deep: TinyModel) -> None:
    by_rank = run_on_ranks(layout, gradients_on_rank, [deep], packing)
    expect_gradients_of_transformers(by_rank, [deep], tolerance=1e-4)


@pytest.mark.parametrize("layout", [Layout(tensor=4), Layout(tensor=4, sequence=True)], ids=str)
def test_ranks_share_a_key_value_head(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    models = [tiny_models["qwen2_tied"], tiny_models["qwen3_untied"]]
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, models), models, tolerance=1e-4)


@pytest.mark.slow
def test_a_checkpoint_goes_into_and_out_of_an_interleaved_pipeline(deep: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    expected = merged(run_on_ranks(INTERLEAVED, save_on_rank, deep, tmp_path / "checkpoint", {}))
    for layout in (INTERLEAVED, Layout(), Layout(pipeline=2, first_stage_layers=3)):
        actual = merged(run_on_ranks(layout, load_on_rank, deep, tmp_path / "checkpoint", {}))
        exactness = {"atol": 0.0, "rtol": 0.0} if layout == INTERLEAVED else {"atol": 2e-6, "rtol": 1e-4}
        for key, tensor in expected.items():
            torch.testing.assert_close(actual[key], tensor, **exactness, msg=lambda m, w=f"{layout} {key}": f"{w}: {m}")
