"""What config.json says of images: Qwen2.5-VL and Qwen3-VL as released, and as transformers 5 writes them."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from megatron_grpo.models.families import is_carried, measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from tests.support.hf_configs import read_released
from tests.support.image_models import read_image_model

FLAT: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {"depth": 32, "hidden_size": 1280, "spatial_merge_size": 2, "out_hidden_size": 2048},
}
"""The form of the released folders of Qwen2.5-VL 3B."""


def test_the_flat_form_and_that_of_transformers_are_one_shape() -> None:
    shape = parse_model_shape(FLAT)
    assert shape.vision is not None
    assert (shape.family, shape.layers, shape.hidden, shape.head_dim) == ("qwen2", 36, 2048, 128)
    assert (shape.qkv_bias, shape.tied_embeddings, shape.rope_theta, shape.rope_scaling) == (True, True, 1e6, None)
    assert (shape.vision.image_token, shape.vision.placeholders, shape.vision.merge) == (151655, (151655, 151656), 2)
    assert shape.vision.rotary_axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    config = AutoConfig.for_model(**FLAT).to_dict()
    assert "num_hidden_layers" not in config, "transformers nests the text part"
    assert parse_model_shape({**config, "architectures": FLAT["architectures"]}) == shape


def test_the_tower_is_carried_and_the_text_part_is_trained() -> None:
    shape = parse_model_shape(FLAT)
    assert "model.layers.0.self_attn.q_proj.bias" in measure_tensors(shape)
    assert is_carried("visual.blocks.0.attn.qkv.weight", shape)
    assert not is_carried("model.layers.0.self_attn.q_proj.bias", shape)


@pytest.mark.parametrize("sections", [[16, 24, 23], [64], [16, 24, -1, 25], "16,24,24"])
def test_sections_have_to_share_the_frequencies_of_a_head(sections: Any) -> None:
    raw = {**FLAT, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    with pytest.raises(ValueError, match=r"mrope_section=.* 64 together, half of head_dim=128"):
        parse_model_shape(raw)


def test_qwen3_vl_as_released() -> None:
    raw = read_released("qwen3_vl_4b")
    shape = parse_model_shape(raw)
    assert shape.vision is not None
    assert (shape.family, shape.layers, shape.rope_theta, shape.tied_embeddings) == ("qwen3", 36, 5e6, True)
    assert (shape.vision.image_token, shape.vision.merge, shape.vision.levels) == (151655, 2, 3)
    assert [layer for layer in range(36) if "image_features" in shape.list_kinds(layer)] == [0, 1, 2]
    assert is_carried("model.visual.deepstack_merger_list.0.norm.weight", shape)
    rotary = Qwen3VLTextRotaryEmbedding(AutoConfig.for_model(**raw).text_config)
    by_axis = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, 64).clone()
    assert rotary.recomposition_frequencies(by_axis).flatten().tolist() == [*shape.vision.rotary_axes] * 2


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("qwen3_vl", "rope", {"mrope_interleaved": False}, "mrope_interleaved=False must be True: vLLM goes by it"),
        (
            "qwen3_vl",
            "vision",
            {"deepstack_visual_indexes": [1, 1]},
            r"deepstack_visual_indexes=\[1, 1\] must be rising",
        ),
        ("qwen3_vl", "vision", {"deepstack_visual_indexes": [4]}, "of the 4 layers of the tower, at most 4 of them"),
        ("qwen3_vl_moe", "text", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported"),
    ],
)
def test_what_readers_read_differently_is_refused(name: str, part: str, change: dict[str, Any], message: str) -> None:
    raw = read_image_model(name, {})
    text = raw["text_config"]
    sections = {
        "rope": {"text_config": {**text, "rope_parameters": {**text["rope_parameters"], **change}}},
        "text": {"text_config": {**text, **change}},
        "vision": {"vision_config": {**raw["vision_config"], **change}},
    }
    assert parse_model_shape(raw).vision is not None
    with pytest.raises(ValueError, match=message):
        parse_model_shape({**raw, **sections[part]})


def test_a_text_model_of_the_family_takes_no_images() -> None:
    text = {key: value for key, value in FLAT.items() if key not in ("vision_config", "rope_scaling")}
    assert parse_model_shape({**text, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}).vision is None
    assert parse_model_shape(PREPARED_MODELS["counting"]).vision is not None
