"""Reading config.json of every family, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_grpo.models.families import _MEDIA, parse_model_shape, read_model_shape
from tests.support.tiny_models import BUILDERS

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 61,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_sizes_are_those_of_the_weights(name: str) -> None:
    model = BUILDERS[name]()
    shape = parse_model_shape(model.config.to_diff_dict() | {"architectures": [type(model).__name__]})
    weights = dict(model.named_parameters())
    attention = "model.layers.0.self_attn."
    assert weights["model.embed_tokens.weight"].shape == (shape.vocab, shape.hidden)
    assert weights[attention + "q_proj.weight"].shape == (shape.attention_heads * shape.head_dim, shape.hidden)
    assert weights[attention + "k_proj.weight"].shape == (shape.key_value_heads * shape.head_dim, shape.hidden)
    assert weights["model.layers.0.mlp.gate_proj.weight"].shape == (shape.ffn_hidden, shape.hidden)
    assert (attention + "q_proj.bias" in weights) == shape.qkv_bias
    assert (attention + "q_norm.weight" in weights) == shape.qk_norm
    assert ("lm_head.weight" in weights) != shape.tied_embeddings
    assert f"model.layers.{shape.layers - 1}.input_layernorm.weight" in weights
    assert f"model.layers.{shape.layers}.input_layernorm.weight" not in weights


def test_rope_settings_in_both_spellings() -> None:
    old = parse_model_shape(BASE | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = parse_model_shape(BASE | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old.rope_theta == new.rope_theta == 5e5
    assert old.rope_scaling is not None
    assert new.rope_scaling is not None
    assert old.rope_scaling["factor"] == new.rope_scaling["factor"] == 8.0
    plain = parse_model_shape(BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (plain.rope_theta, plain.rope_scaling) == (1e6, None)


def test_scaled_frequencies_are_those_of_the_transformers_model() -> None:
    from megatron_grpo.trainer.model.attention import compute_scaled_rope

    model = BUILDERS["llama_untied"]()
    shape = parse_model_shape(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert torch.equal(compute_scaled_rope(shape)[0], model.model.rotary_emb.inv_freq)

    linear = BASE | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    expected = 1.0 / (10000.0 ** (torch.arange(0, 8, 2) / 8)) / 4.0
    torch.testing.assert_close(compute_scaled_rope(parse_model_shape(linear))[0], expected)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        ("mllama", "MllamaForConditionalGeneration"),
        ("llava", "LlavaForConditionalGeneration"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
        ("qwen2_5_omni", "Qwen2_5OmniModel"),
        ("phi4_multimodal", "Phi4MultimodalForCausalLM"),
    ],
)
def test_models_that_read_images_or_sound_are_said_to_be_planned(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    """The folders are as transformers writes them."""
    config = AutoConfig.for_model(model_type)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    text = f"architecture {architecture} is not supported: it reads images or sound, and such models are planned; supp"
    with pytest.raises(ValueError, match=re.escape(text)):
        read_model_shape(tmp_path)


def test_no_model_of_text_alone_is_said_to_read_images() -> None:
    for model_type in (
        "gpt2",
        "gpt_oss",
        "glm4_moe",
        "phi3",
        "mistral",
        "olmo2",
        "mamba",
        "gemma3_text",
        "deepseek_v2",
    ):
        assert not _MEDIA & AutoConfig.for_model(model_type).to_dict().keys(), model_type


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; give a folder in Hugging Face format"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE)[:-1])
    with pytest.raises(ValueError, match="not valid JSON"):
        read_model_shape(tmp_path)
