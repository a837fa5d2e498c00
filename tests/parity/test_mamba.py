"""Nemotron-H on real ranks: odd sizes, shared groups, recomputation, adapters, checkpoints, replayed experts."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.adapter_check import AdapterCheck, check_adapters
from megatron_grpo.verification.problem import SMALL, TINY, make_model
from tests.parity.adapters import LORA, make_lora_rank
from tests.parity.on_rank import expect_close, expect_continuation, load_on_rank
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_routing_replay import expect_equal, of_transformers, other_record, replayed_on_rank
from tests.parity.training import merge, whole_tensors
from tests.support.hf_configs import read_configs
from tests.support.tiny_models import TinyModel

_ODD = read_configs("odd_configs")["mamba"]
GRADIENT = 2e-5
"""Parameters of states are exponents, in which rounding counts for more."""
WHOLE = LoraConfig(rank=3, alpha=7.0, target_modules=["linear_qkv", "linear_proj", "in_proj", "out_proj"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    folder = tmp_path_factory.mktemp("mamba")
    base = {"model_type": "nemotron_h", **SMALL, **TINY["nemotron_h"]}
    for name, odd in _ODD.items():
        sizes = {**base, **odd}
        make_model({**sizes, "num_hidden_layers": len(sizes["layers_block_type"])}, folder / name, seed=1)
    return {name: TinyModel(name, folder / name) for name in _ODD}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(tensor=2, sequence=True), ["mixture"]),
        (Layout(context=2), ["mixture", "dense"]),
        pytest.param(Layout(), list(_ODD), marks=pytest.mark.slow),
        pytest.param(Layout(pipeline=5), ["mixture"], marks=pytest.mark.slow),
        pytest.param(Layout(pipeline=3), ["dense"], marks=pytest.mark.slow),
        pytest.param(Layout(context=3), ["dense"], marks=pytest.mark.slow),
        pytest.param(Layout(tensor=2, context=3, sequence=True), ["mixture"], marks=pytest.mark.slow),
        pytest.param(Layout(data=2, expert=2), ["mixture", "latent"], marks=pytest.mark.slow),
        pytest.param(
            Layout(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True), ["mixture"], marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_gradients_of_odd_sizes(layout: Layout, names: list[str], models: dict[str, TinyModel]) -> None:
    chosen = [models[name] for name in names]
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, chosen), chosen, tolerance=GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(pipeline=2), Layout(context=2)], ids=str)
def test_layers_are_recomputed(layout: Layout, models: dict[str, TinyModel]) -> None:
    chosen, settings = [models["latent"]], {"activation_checkpointing": True}
    by_rank = run_on_ranks(layout, gradients_on_rank, chosen, True, settings)
    expect_gradients_of_transformers(by_rank, chosen, tolerance=GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", {"atol": 5e-6, "rtol": 1e-4}), ("bfloat16", {"atol": 2e-2, "rtol": 2e-2})]
)
def test_a_loaded_checkpoint_continues_in_other_layouts(
    precision: str, tolerance: dict[str, float], models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """Sections are cut anew."""
    read_by = (Layout(), Layout(context=2), Layout(pipeline=5))
    folder, written_by = tmp_path / "checkpoint", Layout(tensor=2, sequence=True)
    expect_continuation(models["mixture"], folder, written_by, read_by, {"precision": precision}, **tolerance)


def save_adapters_on_rank(layout: Layout, model: TinyModel, folder: Path, lora: LoraConfig) -> tuple[Any, AdapterCheck]:
    """Take two steps, save, and take a third; returns the published weights and the check of the adapters."""
    rank = make_lora_rank(layout, model, lora)
    for _ in range(2):
        rank.train(*train_arguments(layout))
    rank.checkpoint.save(str(folder))
    rank.train(*train_arguments(layout))
    return whole_tensors(rank), check_adapters(rank.gather_chunks(), rank.shape)


load_adapters_on_rank = partial(load_on_rank, make=make_lora_rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written_by", "lora"),
    [
        ("mixture", Layout(tensor=2, sequence=True), WHOLE),
        ("latent", Layout(tensor=2, sequence=True), WHOLE),
        ("dense", Layout(context=2), replace(WHOLE, target_modules=[*LORA.target_modules, "in_proj", "out_proj"])),
    ],
)
def test_adapters_are_published_and_continue_in_other_layouts(
    name: str, written_by: Layout, lora: LoraConfig, models: dict[str, TinyModel], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    by_rank = run_on_ranks(written_by, save_adapters_on_rank, models[name], folder, lora)
    assert all(check == AdapterCheck([], has_moved=True) for _, check in by_rank)
    expected, before = merge([weights for weights, _ in by_rank]), models[name].tensors()
    changed = {key for key, tensor in expected.items() if not torch.equal(tensor, before[key])}
    assert {key.rpartition("mixer.")[2] for key in changed} >= {"in_proj.weight", "out_proj.weight", "q_proj.weight"}
    actual = merge(run_on_ranks(Layout(), load_adapters_on_rank, models[name], folder, {"lora": lora}))
    expect_close(actual, expected, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tensor=2, sequence=True), Layout(pipeline=5)], ids=str)
def test_replayed_routing_equals_transformers_that_is_forced_to_it(
    layout: Layout, models: dict[str, TinyModel]
) -> None:
    records = other_record(models["mixture"])
    logprobs, gradients = of_transformers(models["mixture"], records)
    by_rank = run_on_ranks(layout, replayed_on_rank, models["mixture"], records)
    expect_equal(by_rank, logprobs, gradients, atol=3e-5, rtol=2e-4)
