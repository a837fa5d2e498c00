"""The model that layouts compute, and transformers' results, where its defaults fail or differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GlmMoeDsaConfig

from megatron_grpo.config.errors import RunError
from megatron_grpo.models.families import read_model_shape
from megatron_grpo.verification.problem import EXPERTS, SMALL, compute_truth, make_batch, prepare_model
from tests.support.hf_configs import read_released
from tests.support.released_configs import GEMMA3_1B, in_the_new_spelling

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


@pytest.mark.parametrize("raw", [GEMMA3_1B, in_the_new_spelling(GEMMA3_1B)], ids=["old", "new"])
def test_a_small_copy_has_layers_with_a_window_and_without(raw: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "gemma3_text"}))
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert small.layers == 4
    assert set(small.windowed) == {True, False}
    assert small.window == 16
    assert small.softmax_scale == 1 / 16


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
    types = GlmMoeDsaConfig(**{**read_released("glm_5"), **keys}).indexer_types
    (tmp_path / "config.json").write_text(json.dumps({**read_released("glm_5"), **keys, "indexer_types": types}))
    large = read_model_shape(tmp_path)
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert large.indexer is not None
    assert small.indexer is not None
    assert set(small.indexer.layers) == set(large.indexer.layers)
    assert small.indexer.layers[-1] == large.indexer.layers[-1]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 4)])
def test_a_small_copy_has_one_group_of_experts_if_the_model_has(groups: int, top_groups: int, tmp_path: Path) -> None:
    raw = read_released("moonlight_16b_a3b") | {"n_group": groups, "topk_group": top_groups}
    raw |= {"num_experts_per_tok": 8, "n_routed_experts": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    small = read_model_shape(prepare_model(str(tmp_path), True, tmp_path / "small", 0))
    assert small.experts is not None
    assert (small.experts.groups > 1) == (groups > 1)
