"""What config.json says of images: Qwen2.5-VL as released, flat, and as transformers 5 writes it."""

from typing import Any

import pytest
from transformers import AutoConfig

from megatron_grpo.models.families import is_carried, measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.source import PREPARED_MODELS

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


def test_a_text_model_of_the_family_takes_no_images() -> None:
    text = {key: value for key, value in FLAT.items() if key not in ("vision_config", "rope_scaling")}
    assert parse_model_shape({**text, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}).vision is None
    assert parse_model_shape(PREPARED_MODELS["counting"]).vision is not None
