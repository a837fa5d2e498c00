"""Models that see images: their text part is read, the other parts reach exports unchanged, by either form of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
from megatron_grpo.models.families import (
    add_text_prefix,
    measure_tensors,
    parse_model_shape,
    read_model_shape,
    remove_text_prefix,
)
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.models.tokenizer_files import read_end_tokens, read_vocabulary_size
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from megatron_grpo.trainer.hf_export import find_changed_settings, read_carried_tensors
from megatron_grpo.verification.hf_model import load_eager_model
from tests.support.vision_models import CONTAINERS, make_vision_model

IDS = torch.arange(3, 40)[None]
FILE = "model.safetensors"
OUTSIDE, INSIDE = "language_model.", "model.language_model."


def change_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **entries}))


def rename_in_other_form(folder: Path, prefix: str) -> None:
    """Name all tensors as folders of other releases do: with "model." before every part, or without."""
    renamed = {}
    for name, tensor in load_file(folder / FILE).items():
        plain = remove_text_prefix(name, prefix)
        if plain != name or plain == "lm_head.weight":
            renamed[add_text_prefix(plain, INSIDE if prefix == OUTSIDE else OUTSIDE)] = tensor
        else:
            renamed[name.removeprefix("model.") if prefix == INSIDE else f"model.{name}"] = tensor
    save_file(renamed, folder / FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("is_renamed", [False, True], ids=["as saved", "other names"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_the_text_part_computes_what_the_whole_model_computes(name: str, is_renamed: bool, tmp_path: Path) -> None:
    model = make_vision_model(name, tmp_path)
    prefix = read_model_shape(tmp_path).text_prefix
    if is_renamed:
        rename_in_other_form(tmp_path, prefix)
        prefix = INSIDE if prefix == OUTSIDE else OUTSIDE
    shape = read_model_shape(tmp_path)
    assert shape.text_prefix == prefix
    assert shape.family == name.removesuffix("_moe" if name == "gemma4_moe" else "")
    assert list(find_weight_problems(tmp_path, shape)) == []
    stored = load_file(tmp_path / FILE)
    trained, carried = measure_tensors(shape), dict(read_carried_tensors(tmp_path, shape, torch.float32))
    assert trained.keys() | carried.keys() == stored.keys()
    assert not trained.keys() & carried.keys()
    assert all(torch.equal(stored[key], tensor) for key, tensor in carried.items())
    with torch.no_grad():
        expected = model(IDS).logits
        actual = load_eager_model(tmp_path, torch.float32)(IDS).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONTAINERS)
def test_transformers_loads_an_export_with_all_its_parts(name: str, tmp_path: Path) -> None:
    make_vision_model(name, tmp_path / "source")
    shape = read_model_shape(tmp_path / "source")
    stored = load_file(tmp_path / "source" / FILE)
    tensors: dict[str, Tensor] = {key: stored[key] * 2 for key in measure_tensors(shape)}
    carried = read_carried_tensors(tmp_path / "source", shape, torch.float32)
    settings = find_changed_settings(tmp_path / "source", shape)
    write_hf_folder([*tensors.items(), *carried], tmp_path / "source", tmp_path / "out", settings=settings)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / FILE)
    assert all(torch.equal(again[key], stored[key] * (2 if key in tensors else 1)) for key in again)
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("source", "out"))
    assert after == before


def test_sizes_and_end_tokens_are_those_of_the_text_part(tmp_path: Path) -> None:
    make_vision_model("ministral3", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert (read_vocabulary_size(tmp_path), read_end_tokens(tmp_path)) == (131, (2,))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_engines_get_the_settings_of_the_text_part(is_quantized: bool, tmp_path: Path) -> None:
    model = make_vision_model("ministral3", tmp_path)
    if is_quantized:
        change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    settings = VllmSettings(
        model_path=str(tmp_path),
        config=GenerationConfig(),
        precision="float32",
        max_total_sequence_length=8,
        awaits_refit=True,
    )
    overrides = make_engine_arguments(settings)["hf_overrides"]
    scaling = {"beta": 0.1, "original_max_position_embeddings": 8}
    if not is_quantized:
        assert overrides == {"text_config": {"llama_4_scaling": scaling}}
        return
    config = overrides(model.config)
    assert config.text_config.llama_4_scaling == scaling
    assert config.text_config.hidden_size == 64
    assert config.vision_config.hidden_size == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": True}, None),
        ({"text_config": {"model_type": "qwen3"}}, "text_config.model_type=qwen3 .*; use mistral or ministral3"),
        ({"model_type": "mistral"}, "model_type=mistral is not that of Mistral3ForConditionalGeneration"),
        ({"text_config": {}}, "text_config is missing"),
    ],
)
def test_what_the_two_readers_read_differently_is_refused(
    change: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    make_vision_model("ministral3", tmp_path)
    change_config(tmp_path, **change)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            read_model_shape(tmp_path)
        return
    # The head differs from the embedding, which both readers notice.
    assert not read_model_shape(tmp_path).tied_embeddings
    assert parse_model_shape(json.loads((tmp_path / "config.json").read_text())).tied_embeddings
    tensors = load_file(tmp_path / FILE)
    save_file({key: value for key, value in tensors.items() if "lm_head" not in key}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True and text_config\.tie_word_embeddings=False differ"):
        read_model_shape(tmp_path)
