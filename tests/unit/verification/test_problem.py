"""The model that layouts compute, and transformers' results, where its defaults fail or differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GlmMoeDsaConfig

from megatron_grpo.config.errors import RunError
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.verification.problem import EXPERTS, SMALL, compute_truth, make_batch, prepare_model
from tests.support.gemma3_config import OLD, in_the_new_spelling
from tests.support.hf_configs import config_folder

PADDING = 20


def made(folder: Path, **changes: object) -> Path:
    """A small random model, the same one for the same sizes."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **changes})).save_pretrained(folder)
    return folder


def test_the_row_of_the_padding_token_gets_its_gradient(tmp_path: Path) -> None:
    batch = make_batch(SMALL["vocab_size"], 8, 32, 0)
    ids = batch.fields.token_ids
    assert ids is not None
    assert (ids == PADDING).any()
    without = compute_truth(made(tmp_path, model_type="qwen2"), batch).gradients
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": PADDING}))
    found = compute_truth(tmp_path, batch).gradients
    assert found.keys() == without.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, without[name], msg=name)


def test_experts_may_have_any_width(tmp_path: Path) -> None:
    sizes = {**EXPERTS, "intermediate_size": 66, "sliding_window": None}
    batch = make_batch(SMALL["vocab_size"], 4, 16, 0)
    truth = compute_truth(made(tmp_path, model_type="mixtral", **sizes), batch)
    assert truth.gradients["model.layers.0.block_sparse_moe.experts.0.w1.weight"].shape == (66, SMALL["hidden_size"])


def test_a_failure_of_transformers_is_one_message(tmp_path: Path) -> None:
    folder = made(tmp_path, model_type="qwen2")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(RunError, match=f"^transformers cannot compute {tmp_path}: SafetensorError: [^\\n]*$"):
        compute_truth(folder, make_batch(SMALL["vocab_size"], 4, 16, 0))


@pytest.mark.parametrize("raw", [OLD, in_the_new_spelling(OLD)], ids=["old", "new"])
def test_a_small_copy_has_layers_with_a_window_and_without(raw: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "gemma3_text"}))
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert small.layers == 4
    assert set(small.windowed) == {True, False}
    assert small.window == 16
    assert small.softmax_scale == 1 / 16


def released(name: str, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((config_folder(name) / "config.json").read_text())
    return raw | changes


GLM = released("zai-org/GLM-5")
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {}}
QWEN_VL = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "vision_config": {}}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (KIMI | {"text_config": released("moonshotai/Kimi-K2-Instruct")}, "KimiK25ForConditionalGeneration is not"),
        (QWEN_VL | {"text_config": {"model_type": "qwen3_vl_text"}}, "it reads images or sound, and such models are"),
        (
            released("MiniMaxAI/MiniMax-M2", quantization_config=INT4),
            "quantization_config (compressed-tensors): weights",
        ),
        (released("moonshotai/Kimi-K2-Instruct", quantization_config=INT4), "convert the model to bfloat16 first"),
        (GLM | {"indexer_rope_interleave": False}, 'add "indexer_rope_interleave": true'),
    ],
    ids=["Kimi-K2.5", "Qwen3-VL", "MiniMax", "Kimi-K2 in 4 bits", "GLM"],
)
def test_a_small_copy_is_refused_in_the_words_of_the_folder(raw: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    refusals = []
    for shrink in (True, False):
        with pytest.raises(ValueError, match=re.escape(text)) as refusal:
            prepare_model(str(tmp_path), shrink, tmp_path / "small", 0)
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]
    assert len(refusals[0]) < 1500
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3, "head_dim": 192},
        {"index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
        {},
    ],
)
def test_a_small_glm_shares_indexers_as_the_large_one(keys: dict[str, Any], tmp_path: Path) -> None:
    """GLM-5.2 says it three times: by kinds, by their frequency, and by where they begin."""
    types = GlmMoeDsaConfig(**{**GLM, **keys}).indexer_types
    (tmp_path / "config.json").write_text(json.dumps({**GLM, **keys, "indexer_types": types}))
    large = read_model_shape(tmp_path)
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert large.indexer is not None
    assert small.indexer is not None
    assert set(small.indexer.layers) == set(large.indexer.layers)
    assert small.indexer.layers[-1] == large.indexer.layers[-1]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 4)])
def test_a_small_copy_has_one_group_of_experts_if_the_model_has(groups: int, top_groups: int, tmp_path: Path) -> None:
    raw = released("moonshotai/Moonlight-16B-A3B-Instruct", n_group=groups, topk_group=top_groups)
    raw |= {"num_experts_per_tok": 8, "n_routed_experts": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert small.experts is not None
    assert (small.experts.groups > 1) == (groups > 1)
