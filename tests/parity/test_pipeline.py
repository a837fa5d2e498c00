"""Pipelines, interleaved and uneven, shared key/value heads; weights to Megatron and back, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.models.hf_weights import iter_hf_tensors, load_hf_weights
from megatron_grpo.trainer.model.build import build_model
from megatron_grpo.trainer.parallel import StageCommunicator
from tests.parity.on_rank import expect_continuation
from tests.parity.policy_training import (
    expect_gradients_of_transformers,
    gradients_on_rank,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
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
    communicate_shapes, compared = StageCommunicator._communicate_shapes, []

    def compare(self: StageCommunicator, *sent: Any, **receives: bool) -> tuple[list[int], list[int]]:
        announced = P2PCommunicator._communicate_shapes(self, *sent, **receives)
        shapes = communicate_shapes(self, *sent, **receives)
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


Given = tuple[bool, list[tuple[str, Tensor | None]]]
"""(whether this is tensor-parallel rank 0, what came)."""


def round_trip(layout: Layout, folders: list[Path], precision: str) -> list[Given]:
    results = []
    for folder in folders:
        shape = read_model_shape(folder)
        chunks = build_model(PolicyConfig(parallel=layout.parallel, precision=precision), shape)
        load_hf_weights(chunks, shape, folder)
        tensors = list(iter_hf_tensors(chunks, shape))
        results.append((parallel_state.get_tensor_model_parallel_rank() == 0, tensors))
    return results


def full_tensors(by_rank: list[list[Given]], position: int) -> dict[str, Tensor]:
    """All tensors of one model, from the ranks that gave them."""
    full: dict[str, Tensor] = {}
    for rank in by_rank:
        first, tensors = rank[position]
        if not first:
            assert all(tensor is None for _, tensor in tensors)
            continue
        for name, tensor in tensors:
            assert tensor.is_contiguous()
            assert name not in full, f"two stages gave {name}"
            full[name] = tensor
    return full


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_round_trip_is_exact(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    folders = [model.path for model in tiny_models.values()]
    by_rank = run_on_ranks(layout, round_trip, folders, "float32")
    for position, model in enumerate(tiny_models.values()):
        actual, expected = full_tensors(by_rank, position), model.tensors()
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), f"{model.name}: {name}"


def test_bfloat16_weights_are_the_rounded_ones(tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["qwen2_tied"]
    by_rank = run_on_ranks(Layout(tensor=2, pipeline=2), round_trip, [model.path], "bfloat16")
    for name, tensor in full_tensors(by_rank, 0).items():
        assert torch.equal(tensor, model.tensors()[name].bfloat16()), name


@pytest.mark.parametrize("shard_bytes", [2**30, 10_000], ids=["one_file", "sharded"])
def test_written_folder_loads_in_transformers(
    shard_bytes: int, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    for model in tiny_models.values():
        output = tmp_path / model.name
        (source := tmp_path / f"{model.name}_source").mkdir()
        for file in model.path.iterdir():
            (source / file.name).write_bytes(file.read_bytes())
        (source / "tokenizer_config.json").write_text("{}")
        write_hf_folder(sorted(model.tensors().items()), source, output, max_file_bytes=shard_bytes)
        assert (output / "tokenizer_config.json").exists()
        assert len(list(output.glob("*.safetensors"))) == 1 or shard_bytes == 10_000
        loaded = AutoModelForCausalLM.from_pretrained(output)
        for name, tensor in model.load().state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), f"{model.name}: {name}"


def test_written_config_names_the_dtype_of_the_weights(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["qwen3_tied"]
    tensors = ((name, tensor.bfloat16()) for name, tensor in model.tensors().items())
    write_hf_folder(tensors, model.path, tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
