"""A folder as others leave it: what is read of it, and what is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_grpo.models.families import build_weight_map, is_untied_by_weights, parse_model_shape, read_model_shape
from megatron_grpo.models.stored_tensors import has_own_head, list_stored_tensors
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from megatron_grpo.trainer.hf_export import build_quantization_config, quantize_tensors
from tests.support.tiny_models import make_tiny_model

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("models"), dict[str, Path]()
    return lambda name: made.setdefault(name, make_tiny_model(name, folder).path)


@pytest.fixture
def copy_of(models: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Make a copy of a tiny model with other tensors and other entries of config.json."""

    def make(name: str, change: Callable[[dict[str, Tensor]], Any] | None = None, **entries: Any) -> Path:
        source = models(name)
        tensors = load_file(source / FILE)
        changed = change(tensors) if change is not None else None
        folder = tmp_path / name
        folder.mkdir()
        save_file(changed if changed is not None else tensors, folder / FILE, metadata={"format": "pt"})
        raw = json.loads((source / "config.json").read_text()) | entries
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return make


def with_head(factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * factor

    return change


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen2_tied", "gemma3"])
def test_a_stored_head_is_kept_where_transformers_keeps_it(
    name: str, factor: float, copy_of: Callable[..., Path]
) -> None:
    folder = copy_of(name, with_head(factor))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shape = read_model_shape(folder)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert shape.tied_embeddings == is_tied == (factor == 1.0)
    assert is_untied_by_weights(folder) != is_tied
    assert list(find_weight_problems(folder, shape)) == []
    names = {tensor.name for entry in build_weight_map(shape) for tensor in entry.hf if not entry.copy}
    assert ("lm_head.weight" in names) != is_tied


def test_a_head_that_differs_in_its_last_number_is_one_of_its_own(copy_of: Callable[..., Path]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        with_head(1.0)(tensors)
        tensors["lm_head.weight"][-1, -1] += 1e-3

    folder = copy_of("qwen3_tied", change)
    assert has_own_head(folder)
    tensors = load_file(folder / FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    assert not has_own_head(folder), "the file is compared anew when it has changed"


def test_without_weights_config_json_is_believed(models: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((models("qwen3_tied") / "config.json").read_bytes())
    assert read_model_shape(tmp_path).tied_embeddings
    (tmp_path / FILE).write_bytes(b"cut off")
    assert read_model_shape(tmp_path).tied_embeddings
    assert not is_untied_by_weights(tmp_path / "missing")


LAYER = "model.layers.0.self_attn."


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama_untied", f"{LAYER}q_norm.weight"),
        ("llama_untied", f"{LAYER}q_proj.bias"),
        ("qwen2_tied", f"{LAYER}o_proj.bias"),
        ("qwen3_tied", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("qwen3_untied", "v_head.summary.weight"),
        ("qwen3_untied", "visual.blocks.0.attn.qkv.weight"),
        ("qwen3_untied", f"{LAYER}k_proj.k_scale"),
        ("qwen3_untied", "model.layers.2.mlp.up_proj.weight"),
        ("gemma3", "model.embed_tokens.weight_scale"),
    ],
)
def test_a_tensor_that_nothing_reads_is_named(name: str, extra: str, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(name, lambda tensors: tensors.update({extra: torch.zeros(2)}))
    (text,) = find_weight_problems(folder, read_model_shape(folder))
    assert text.startswith("the folder holds 1 tensor(s) that a model of its config.json does not have")
    assert extra in text


def test_tensors_that_follow_from_others_are_no_problem(copy_of: Callable[..., Path]) -> None:
    inverse = {f"{LAYER}rotary_emb.inv_freq": torch.ones(4)}
    folder = copy_of("qwen3_untied", lambda tensors: tensors.update(inverse))
    assert list(find_weight_problems(folder, read_model_shape(folder))) == []


def test_layers_that_predict_further_tokens_are_left_out(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("deepseek_v3", lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.zeros(2)}))
    assert list(find_weight_problems(folder, read_model_shape(folder))) == []


def in_fp8_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = {}
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2:
            scale = tensor.abs().amax() / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[name.replace(".weight", ".weight_scale_inv")] = scale.reshape(1, 1)
        else:
            stored[name] = tensor
    return stored


QUANTIZED = [
    {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "mxfp4"},
    {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}},
    build_quantization_config("int8"),
    build_quantization_config("fp8"),
    {},
]


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("settings", QUANTIZED, ids=lambda value: str(value.get("quant_method")))
def test_a_quantized_model_is_refused_by_the_key(settings: dict[str, Any], family: str) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    raw = {"architectures": [family], **dict.fromkeys(sizes, 4), "quantization_config": settings}
    with pytest.raises(ValueError, match=r"^quantization_config.*convert the model to bfloat16 first"):
        parse_model_shape(raw)


def test_settings_beside_config_json(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("qwen3_tied")
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ValueError, match=r"hf_quant_config.json: quantization \(FP8\).*bfloat16 first"):
        read_model_shape(folder)


@pytest.mark.parametrize("change", [in_fp8_blocks, lambda tensors: dict(quantize_tensors(tensors.items(), "int8"))])
def test_quantized_tensors_without_the_key_are_refused(change: Any, copy_of: Callable[..., Path]) -> None:
    folder = copy_of("qwen3_untied", change)
    (text,) = find_weight_problems(folder, read_model_shape(folder))
    assert "convert the model to bfloat16 first" in text
    assert "_proj.weight is stored as" in text


def test_adapters_are_told_from_a_model(copy_of: Callable[..., Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    for folder in (alone, copy_of("qwen3_tied")):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"holds adapters for org/base .* merge_and_unload"):
            read_model_shape(folder)


def test_files_that_only_some_would_read(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("qwen3_untied")
    tensors = load_file(folder / FILE)
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")
    with pytest.raises(ValueError, match=r"consolidated.safetensors lies beside model.safetensors"):
        list_stored_tensors(folder)
    (folder / "consolidated.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"has both model.safetensors, which transformers reads"):
        list_stored_tensors(folder)
    (folder / FILE).unlink()
    assert list_stored_tensors(folder).keys() == tensors.keys()
    del index["weight_map"][names[0]]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"holds {names[0]}, which is in no file"):
        list_stored_tensors(folder)
