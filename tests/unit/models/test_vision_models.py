"""Models that see images, and layers that predict further tokens: what exports copy and engines need."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from megatron_grpo.config.schema import Config, GenerationConfig
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
from megatron_grpo.models.families import add_text_prefix, is_carried, measure_tensors, remove_text_prefix
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.models.tokenizer_files import read_end_tokens, read_vocabulary_size
from megatron_grpo.preflight.model_file_checks import find_draft_problems, find_weight_problems
from megatron_grpo.trainer.hf_export import build_quantization_config, find_changed_settings, read_carried_tensors
from megatron_grpo.verification.hf_model import load_eager_model
from megatron_grpo.verification.problem import prepare_model
from tests.support.quantized_folders import FP8_BLOCKS, to_fp8
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


FAMILIES = {"deepseek_v3": "model.layers.{}.", "glm4_moe": "model.layers.{}.", "qwen3_next": "mtp."}
"""Beginnings of the names of the layers' tensors; the number is that of the model's layers."""


def make_model(family: str, folder: Path, **settings: Any) -> dict[str, Tensor]:
    """A small model with a layer that predicts further tokens; returns that layer's tensors."""
    prepare_model(f"tiny:{family}", False, folder, 0)
    raw = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(raw))
    prefix = FAMILIES[family].format(raw["num_hidden_layers"])
    extra = {f"{prefix}eh_proj.weight": torch.randn(4, 8).bfloat16(), f"{prefix}enorm.weight": torch.randn(4)}
    file = folder / "model.safetensors"
    save_file(load_file(file) | extra, file, {"format": "pt"})
    return extra


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_copies_them(family: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    extra = make_model(family, source, num_nextn_predict_layers=1)
    shape = read_model_shape(source)
    assert list(find_weight_problems(source, shape)) == []
    carried = dict(read_carried_tensors(source, shape, torch.bfloat16))
    assert carried.keys() == extra.keys()
    trained = {name: torch.ones(size) for name, size in measure_tensors(shape).items()}
    settings = find_changed_settings(source, shape)
    write_hf_folder([*trained.items(), *carried.items()], source, tmp_path / "out", settings=settings)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == trained.keys() | extra.keys()
    assert all(
        torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype for name, tensor in extra.items()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_quantized_ones_become_plain_as_the_export_is(tmp_path: Path) -> None:
    extra = make_model("deepseek_v3", tmp_path, num_nextn_predict_layers=1)
    matrix, norm = extra
    numbers, scales = to_fp8(extra[matrix].float(), [128, 128])
    tensors = load_file(tmp_path / "model.safetensors") | {matrix: numbers, f"{matrix}_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": FP8_BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    carried = dict(read_carried_tensors(tmp_path, read_model_shape(tmp_path), torch.bfloat16))
    assert carried.keys() == extra.keys()
    assert torch.equal(carried[matrix], (numbers.float() * scales).bfloat16())
    assert torch.equal(carried[norm], extra[norm])
    assert carried[norm].dtype == torch.float32


def test_released_names_are_told_apart() -> None:
    raw = json.loads(Path("tests/data/hf_configs/deepseek_v3/config.json").read_text())
    shape = parse_model_shape(raw)
    further = ["embed_tokens", "shared_head.head", "eh_proj", "self_attn.kv_b_proj", "mlp.experts.255.up_proj"]
    assert all(is_carried(f"model.layers.61.{name}.weight", shape) for name in further)
    assert not is_carried("model.layers.6.mlp.gate.weight", shape)
    assert not is_carried("model.layers.60.self_attn.kv_b_proj.weight", shape)
    (pattern,) = [text for text in build_quantization_config("fp8", shape)["ignore"] if "layers" in text]
    modules = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(62)]
    assert [name for name in modules if re.match(pattern.removeprefix("re:"), name)] == modules[-1:]


@pytest.mark.parametrize(
    ("has_layer", "settings", "text"),
    [
        (True, {"num_nextn_predict_layers": 1}, None),
        (False, {"num_nextn_predict_layers": 1}, "has no layers that predict further tokens (MTP); give a folder"),
        (True, {"num_nextn_predict_layers": 0}, "has num_nextn_predict_layers=0, and vLLM makes no such layer"),
        (True, {"num_nextn_predict_layers": 1, "quantization_config": FP8_BLOCKS}, "has quantized weights"),
    ],
)
def test_what_engines_need_to_propose_tokens(
    has_layer: bool, settings: dict[str, Any], text: str | None, tmp_path: Path
) -> None:
    extra = make_model("deepseek_v3", tmp_path, **settings)
    if not has_layer:
        tensors = load_file(tmp_path / "model.safetensors")
        base_tensors = {name: tensor for name, tensor in tensors.items() if name not in extra}
        save_file(base_tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config, shape = Config(), read_model_shape(tmp_path)
    assert list(find_draft_problems(config, tmp_path, shape)) == []
    config.generation.engine.speculative.method = "mtp"
    config.generation.engine.speculative.num_speculative_tokens = 1
    problems = list(find_draft_problems(config, tmp_path, shape))
    assert [problem.subject for problem in problems] == ["generation.engine.speculative.method=mtp"] * (
        text is not None
    )
    assert all(text is not None and text in problem.text and "use ngram" in problem.text for problem in problems)
