"""Weights from Hugging Face format to Megatron and back, in every layout, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.models.hf_weights import iter_hf_tensors, load_hf_weights
from megatron_grpo.trainer.model.build import build_model
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.support.tiny_models import TinyModel

Given = tuple[bool, list[tuple[str, Tensor | None]]]
"""(whether this is tensor-parallel rank 0, what came)."""


def round_trip(layout: Layout, folders: list[Path], precision: str) -> list[Given]:
    found = []
    for folder in folders:
        shape = read_model_shape(folder)
        chunks = build_model(PolicyConfig(parallel=layout.parallel, precision=precision), shape)
        load_hf_weights(chunks, shape, folder)
        tensors = list(iter_hf_tensors(chunks, shape))
        found.append((parallel_state.get_tensor_model_parallel_rank() == 0, tensors))
    return found


def full_tensors(by_rank: list[list[Given]], position: int) -> dict[str, Tensor]:
    """All tensors of one model, from the ranks that gave them."""
    full: dict[str, Tensor] = {}
    for rank in by_rank:
        first, tensors = rank[position]
        if not first:
            assert all(tensor is None for _, tensor in tensors)
            continue
        for name, tensor in tensors:
            assert tensor is not None
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
