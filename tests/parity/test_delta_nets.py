"""Gated delta nets on real ranks, in odd sizes: gradients, packing, checkpoints, adapters, a decay in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.adapter_check import check_adapters
from tests.parity.on_rank import train_on_rank
from tests.parity.policy_training import (
    expect_gradients_of_transformers,
    gradients_on_rank,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge, whole_tensors
from tests.support.hf_configs import read_configs
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

MODELS = read_configs("odd_configs")["delta_nets"]
DENSE = ("first", "alone")
LAYOUTS = [
    Layout(tensor=2, sequence=True),
    Layout(context=2),
    *rare(
        [
            Layout(),
            Layout(tensor=2),
            Layout(context=3),
            Layout(pipeline=4),
            Layout(pipeline=2, virtual_pipeline=2),
            Layout(tensor=2, context=3, sequence=True),
            Layout(data=2, expert=2),
            Layout(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True),
        ]
    ),
]
TOLERANCE = 1e-4
"""transformers rounds, too: its float32 is as far from float64 as the layouts are from it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    folder = tmp_path_factory.mktemp("delta_nets")
    for name, keys in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
                else:
                    parameter.normal_(0.0, 0.1)
        model.save_pretrained(folder / name)
    return {name: TinyModel(name, folder / name) for name in MODELS}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_equal_transformers_one_sequence_at_a_time(layout: Layout, models: dict[str, TinyModel]) -> None:
    """Ranks pack several sequences, transformers sees one alone: a state that leaks would change the gradients."""
    needs_sequence = layout.tensor > 1 and not layout.sequence
    chosen = [model for name, model in models.items() if name not in DENSE] if layout.expert > 1 else [*models.values()]
    chosen = [models[name] for name in DENSE] if needs_sequence else chosen
    by_rank = run_on_ranks(layout, gradients_on_rank, chosen, timeout_s=600.0)
    expect_gradients_of_transformers(by_rank, chosen, tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"deterministic": True}], ids=str)
def test_settings_that_change_no_number(settings: dict[str, Any], models: dict[str, TinyModel]) -> None:
    chosen = list(models.values())
    by_rank = run_on_ranks(Layout(context=2), gradients_on_rank, chosen, True, settings)
    expect_gradients_of_transformers(by_rank, chosen, tolerance=TOLERANCE)


LORA = LoraConfig(rank=3, target_modules=["linear_qkv", "in_proj", "out_proj"])


def save_on_rank(layout: Layout, model: TinyModel, folder: str, lora: LoraConfig) -> dict[str, Tensor]:
    """Train a step, save, and return the weights; adapters merged."""
    engine = make_engine(layout, model, lora=lora)
    for _ in range(2):
        engine.train(*train_arguments(layout))
    if lora.rank:
        check = check_adapters(engine.gather_chunks(), engine.shape)
        assert not check.faults, check.faults
    engine.checkpoint.save(folder)
    return whole_tensors(engine)


def load_on_rank(layout: Layout, model: TinyModel, folder: str, lora: LoraConfig) -> dict[str, Tensor]:
    engine = make_engine(layout, model, lora=lora)
    engine.checkpoint.load(folder)
    return whole_tensors(engine)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["weights", "adapters"])
def test_a_checkpoint_loads_in_other_layouts(lora: LoraConfig, models: dict[str, TinyModel], tmp_path: Path) -> None:
    model, saving = models["next"], Layout(tensor=2, sequence=True)
    saved = merge(run_on_ranks(saving, save_on_rank, model, str(tmp_path), lora, timeout_s=600.0))
    changed = {name for name, tensor in saved.items() if not torch.equal(tensor, model.tensors()[name])}
    assert any("in_proj_qkvz" in name for name in changed)
    assert any("conv1d" in name for name in changed) != bool(lora.rank)
    for layout in (Layout(), Layout(pipeline=2, context=2)):
        loaded = merge(run_on_ranks(layout, load_on_rank, model, str(tmp_path), lora, timeout_s=600.0))
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name


def test_the_decay_stays_in_float32(models: dict[str, TinyModel]) -> None:
    weights = merge(run_on_ranks(Layout(data=2), train_on_rank, models["first"], {"precision": "bfloat16"}))
    before = models["first"].tensors()
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith("A_log") else torch.bfloat16), name
        if name.endswith("A_log"):
            assert not torch.equal(tensor, before[name]), "it is trained"
            assert not torch.equal(tensor, tensor.bfloat16().float()), "and has more digits than bfloat16"
