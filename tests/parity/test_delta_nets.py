"""Gated delta nets on real ranks, in odd sizes: gradients, packing, checkpoints, adapters, a decay in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.adapter_check import check_adapters
from tests.parity.policy_training import (
    expect_gradients_of_transformers,
    gradients_on_rank,
    make_engine,
    train_arguments,
)
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetched, merged, whole_tensors
from tests.support.tiny_models import VOCAB, TinyModel

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-4,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "pad_token_id": None,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 12}
_DELTA, _ATTENTION = "linear_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    # One layer of attention, in the first stage; tied.
    "first": {
        "model_type": "qwen3_5_text",
        "layer_types": [_ATTENTION, _DELTA, _DELTA, _DELTA],
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    # Delta nets alone, with as many value heads as key heads.
    "alone": {
        "model_type": "qwen3_5_text",
        "layer_types": [_DELTA] * 4,
        "linear_num_value_heads": 6,
        "linear_conv_kernel_dim": 1,
    },
    "mixture": {
        **_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "layer_types": [_DELTA, _ATTENTION, _ATTENTION, _DELTA],
        "num_experts_per_tok": 3,
    },
    # The pattern of three layers does not divide four; one expert a token.
    "next": {
        **_EXPERTS,
        "model_type": "qwen3_next",
        "full_attention_interval": 3,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "mlp_only_layers": [2],
    },
}
DENSE = ("first", "alone")
LAYOUTS = [
    Layout(tensor=2, sequence=True),
    Layout(context=2),
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            Layout(),
            Layout(tensor=2),
            Layout(context=3),
            Layout(pipeline=4),
            Layout(pipeline=2, virtual_pipeline=2),
            Layout(tensor=2, context=3, sequence=True),
            Layout(data=2, expert=2),
            Layout(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True),
        )
    ),
]
TOLERANCE = 1e-4
"""transformers rounds, too: its float32 is as far from float64 as the layouts are from it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    folder = tmp_path_factory.mktemp("delta_nets")
    for name, keys in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**_SIZES, **keys}), dtype=torch.float32)
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
        share, microbatches, loss_fn, counts = train_arguments(layout)
        engine.train(fetched(engine, share, loss_fn), microbatches, loss_fn, counts)
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
    saved = merged(run_on_ranks(saving, save_on_rank, model, str(tmp_path), lora, timeout_s=600.0))
    changed = {name for name, tensor in saved.items() if not torch.equal(tensor, model.tensors()[name])}
    assert any("in_proj_qkvz" in name for name in changed)
    assert any("conv1d" in name for name in changed) != bool(lora.rank)
    for layout in (Layout(), Layout(pipeline=2, context=2)):
        loaded = merged(run_on_ranks(layout, load_on_rank, model, str(tmp_path), lora, timeout_s=600.0))
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name


def bfloat16_on_rank(layout: Layout, model: TinyModel) -> dict[str, Tensor]:
    engine = make_engine(layout, model, precision="bfloat16")
    share, microbatches, loss_fn, counts = train_arguments(layout)
    engine.train(fetched(engine, share, loss_fn), microbatches, loss_fn, counts)
    return whole_tensors(engine)


def test_the_decay_stays_in_float32(models: dict[str, TinyModel]) -> None:
    weights = merged(run_on_ranks(Layout(data=2), bfloat16_on_rank, models["first"]))
    before = models["first"].tensors()
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith("A_log") else torch.bfloat16), name
        if name.endswith("A_log"):
            assert not torch.equal(tensor, before[name]), "it is trained"
            assert not torch.equal(tensor, tensor.bfloat16().float()), "and has more digits than bfloat16"
