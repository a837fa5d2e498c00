"""Pipelines: interleaved, and with stages of unequal depth; and more tensor-parallel ranks than key/value heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_grpo.trainer.parallel import StageCommunicator
from tests.parity.on_rank import expect_continuation
from tests.parity.policy_training import (
    expect_gradients_of_transformers,
    gradients_on_rank,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import Layout, run_on_ranks
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


def train_with_announced_shapes(layout: Layout, tiny: TinyModel, packing: bool) -> int:
    """Make a step whose stages also announce shapes, as Megatron-Core's do; returns how many were compared."""
    known, compared = StageCommunicator._communicate_shapes, []

    def compare(self: StageCommunicator, *sent: Any, **receives: bool) -> tuple[list[int], list[int]]:
        announced = P2PCommunicator._communicate_shapes(self, *sent, **receives)
        shapes = known(self, *sent, **receives)
        assert [list(shape) for shape in announced] == list(shapes)
        compared.append(shapes)
        return shapes

    with patch.object(StageCommunicator, "_communicate_shapes", compare):
        make_engine(layout, tiny, packing=packing).train(*train_arguments(layout))
    return len(compared)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=4, first_stage_layers=1),
        Layout(pipeline=2, tensor=2, sequence=True, first_stage_layers=3),
        Layout(pipeline=2, context=2, first_stage_layers=3),
    ],
    ids=str,
)
def test_a_stage_knows_the_shapes_that_its_neighbours_announce(layout: Layout, packing: bool, deep: TinyModel) -> None:
    assert all(run_on_ranks(layout, train_with_announced_shapes, deep, packing))


@pytest.mark.parametrize("layout", [Layout(tensor=4), Layout(tensor=4, sequence=True)], ids=str)
def test_ranks_share_a_key_value_head(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    models = [tiny_models["qwen2_tied"], tiny_models["qwen3_untied"]]
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, models), models, tolerance=1e-4)


@pytest.mark.slow
def test_a_checkpoint_goes_into_and_out_of_an_interleaved_pipeline(deep: TinyModel, tmp_path: Path) -> None:
    read_by = (Layout(), Layout(pipeline=2, first_stage_layers=3))
    expect_continuation(deep, tmp_path / "checkpoint", INTERLEAVED, read_by)
