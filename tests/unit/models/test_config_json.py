"""config.json in the spellings of transformers 4 and 5, with nulls, and as people have edited it."""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_grpo.models.families.reading import _MEDIA, find_model_type, parse_model_shape, read_model_shape
from tests.support.config_problems import SMALL
from tests.support.forked import as_ordinary_user
from tests.support.hf_configs import read_released
from tests.support.message_table import read_rows
from tests.support.released_configs import LLAMA4_SCOUT
from tests.support.tiny_models import BUILDERS


def reason(folder: Path, content: Any) -> str:
    file = folder / "config.json"
    file.write_bytes(content) if isinstance(content, bytes) else file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        read_model_shape(folder)
    assert str(caught.value).startswith(str(file)), "it says which file"
    return str(caught.value).removeprefix(str(file))


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
)
def test_a_missing_size(tmp_path: Path, key: str) -> None:
    assert reason(tmp_path, {name: value for name, value in SMALL.items() if name != key}) == f": {key} is missing"


@pytest.mark.parametrize("value", ["many", 0, -4, 2.5, True, [4], {"a": 1}, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["num_hidden_layers", "head_dim", "max_position_embeddings"])
def test_a_size_that_is_none(tmp_path: Path, key: str, value: Any) -> None:
    assert f"{key}=" in reason(tmp_path, SMALL | {key: value})


@pytest.mark.parametrize(("change", "text"), read_rows("config_json", "what_does_not_fit"))
def test_what_does_not_fit(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    assert text in reason(tmp_path, SMALL | change)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[1, 2]", "is not a JSON object but of type list"),
        (b"3", "is not a JSON object but of type int"),
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_what_is_no_config_at_all(tmp_path: Path, content: bytes, text: str) -> None:
    assert text in reason(tmp_path, content)


def test_a_whole_float_counts_as_a_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"num_hidden_layers": 4.0}))
    assert read_model_shape(tmp_path).layers == 4


def test_a_folder_or_a_file_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name)
        file = folder / "config.json"
        file.write_text(json.dumps(SMALL))
        file.chmod(0)

        def read_message() -> str:
            try:
                read_model_shape(folder)
            except ValueError as error:
                return str(error)
            return ""

        assert as_ordinary_user(read_message) == f"{file} cannot be read: Permission denied"
        file.unlink()
        file.mkdir()
        assert read_message() == f"{file} cannot be read: Is a directory"


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
    ("model_type", "architecture"), read_rows("config_json", "models_that_read_images_or_sound_are_said_to_be_planned")
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


FOLDERS = ("deepseek_v3", "deepseek_v3_2", "gemma_4_31b", "glm_4_5_air", "glm_5_3", "gpt_oss_20b", "llama3_1_8b")
FOLDERS += ("minimax_m2_7", "ministral_3_8b", "nvidia_nemotron_3_nano", "olmo_3_7b", "phi_4", "qwen3_30b_a3b")
FOLDERS += ("qwen3_5_9b", "qwen3_next_80b_a3b", "seed_oss_36b")


def is_taken(raw: dict[str, Any]) -> bool:
    try:
        parse_model_shape(raw)
    except ValueError:
        return False
    return True


def is_taken_by_transformers(raw: dict[str, Any], folder: Path) -> bool:
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - its checks raise errors of several kinds
        return False
    return True


@pytest.mark.parametrize("name", FOLDERS)
def test_a_null_is_refused_where_transformers_refuses_it(name: str, tmp_path: Path) -> None:
    raw = read_released(name)
    text = raw.get("text_config", raw)
    nullable_keys = []
    for key in (key for key, value in text.items() if isinstance(value, int | float) and not isinstance(value, bool)):
        changes = [text | {key: value} for value in (["no number"], None)]
        junk, null = ({**raw, "text_config": part} if text is not raw else part for part in changes)
        if not is_taken(junk) and is_taken(null):  # the key is read
            plain = {name: value for name, value in null.items() if name != "auto_map"}
            plain["model_type"] = find_model_type(raw)
            nullable_keys.append(key)
            assert is_taken_by_transformers(plain, tmp_path), key
    assert "hidden_size" not in nullable_keys


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (read_released("deepseek_v3"), "n_shared_experts"),  # vLLM would compute none
        (read_released("deepseek_v3"), "routed_scaling_factor"),
        (read_released("gpt_oss_20b"), "head_dim"),
        (read_released("nvidia_nemotron_3_nano"), "mamba_num_heads"),
        (LLAMA4_SCOUT, "num_key_value_heads"),
    ],
)
def test_the_message_names_the_key(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}=null is not supported; give the number, or leave the key out$"):
        parse_model_shape(raw | {key: None})
