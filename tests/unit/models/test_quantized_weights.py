"""Quantized weights, and tensors of a folder that nothing reads: what is read, refused and named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.families.reading import is_untied_by_weights, parse_model_shape, read_model_shape
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.quantized_weights import is_quantized
from megatron_grpo.models.stored_tensors import has_own_head, list_stored_tensors
from megatron_grpo.models.weight_map import WeightSlice
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from megatron_grpo.trainer.hf_export import build_quantization_config, quantize_tensors
from megatron_grpo.verification.problem import prepare_model
from tests.support.quantized_folders import FP8_BLOCKS, FP8_WHOLE, MXFP4, quantize_folder, to_fp8
from tests.support.tiny_models import make_tiny_model


def write(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> HFFolderReader:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return HFFolderReader(folder)


def read(reader: HFFolderReader, name: str, shape: torch.Size, *bounds: tuple[int, int]) -> Tensor:
    return reader.read(WeightSlice(name, tuple(shape), bounds or tuple((0, size) for size in shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_are_what_transformers_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers, scales = to_fp8(torch.randn(256, 384), [128, 128])
    scales = scales.to(dtype)
    expected = Fp8Dequantize(None)._dequantize_one(numbers, scales, output_dtype=torch.float32)
    reader = write(tmp_path, {"w.weight": numbers, "w.weight_scale_inv": scales}, FP8_BLOCKS)
    torch.testing.assert_close(read(reader, "w.weight", numbers.shape), expected, rtol=0, atol=0)
    box = read(reader, "w.weight", numbers.shape, (100, 200), (129, 130))
    torch.testing.assert_close(box, expected[100:200, 129:130], rtol=0, atol=0)


def test_blocks_at_the_edges_need_not_be_full(tmp_path: Path) -> None:
    """transformers 5.19 refuses such a matrix (kv_a_proj_with_mqa of DeepSeek-V3 has 576 rows)."""
    weight = torch.randn(200, 130)
    numbers, scales = to_fp8(weight, [128, 128])
    with pytest.raises(ValueError, match="not divisible"):
        Fp8Dequantize(None)._dequantize_one(numbers[:, :129], scales)
    reader = write(tmp_path, {"w.weight": numbers, "w.weight_scale_inv": scales}, FP8_BLOCKS)
    values = read(reader, "w.weight", numbers.shape)
    for row in (0, 127, 128, 199):
        for column in (0, 127, 128, 129):
            assert values[row, column] == numbers[row, column].float() * scales[row // 128, column // 128]
    torch.testing.assert_close(values, weight, rtol=0.07, atol=0.01)


def test_fp8_with_one_scale(tmp_path: Path) -> None:
    for shape in ((), (1,)):
        numbers, scale = to_fp8(torch.randn(6, 8), None)
        tensors = {"w.weight": numbers, "w.weight_scale_inv": scale.view(shape)}
        reader = write(tmp_path, tensors, FP8_WHOLE)
        expected = Fp8Dequantize(None)._dequantize_one(numbers, scale.view(1, 1), output_dtype=torch.float32)
        torch.testing.assert_close(read(reader, "w.weight", numbers.shape), expected, rtol=0, atol=0)
        torch.testing.assert_close(
            read(reader, "w.weight", numbers.shape, (2, 4), (0, 8)), expected[2:4], rtol=0, atol=0
        )


def test_mxfp4_is_what_transformers_reads(tmp_path: Path) -> None:
    """Every byte, and every exponent whose numbers are finite in bfloat16."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    blocks = torch.cat([blocks, torch.randint(0, 256, (15, 8, 2, 16), dtype=torch.uint8)])
    exponents = torch.arange(256, dtype=torch.uint8).clamp(max=250).view(16, 8, 2)
    expected = convert_moe_packed_tensors(blocks, exponents)
    reader = write(tmp_path, {"w_blocks": blocks, "w_scales": exponents}, MXFP4)
    assert reader.has("w")
    values = read(reader, "w", expected.shape)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)
    box = read(reader, "w", expected.shape, (3, 5), (30, 33), (1, 7))
    torch.testing.assert_close(box, expected[3:5, 30:33, 1:7], rtol=0, atol=0)


FORMS = {"qwen3": FP8_BLOCKS, "qwen3_moe": FP8_BLOCKS, "llama": FP8_WHOLE, "gpt_oss": MXFP4}


@pytest.mark.parametrize("family", FORMS)
def test_released_forms_are_accepted(tmp_path: Path, family: str) -> None:
    folder = quantize_folder(
        prepare_model(f"tiny:{family}", False, tmp_path / "plain", 0), tmp_path / "quantized", FORMS[family]
    )
    shape = read_model_shape(folder)
    assert is_quantized(folder)
    assert not is_quantized(tmp_path / "plain")
    assert list(find_weight_problems(folder, shape)) == []
    stored = dict(HFFolderReader(tmp_path / "plain").iterate())
    values = dict(HFFolderReader(folder).iterate())
    assert values.keys() == stored.keys()
    for name, tensor in values.items():
        torch.testing.assert_close(tensor.float(), stored[name], rtol=0.26, atol=0.05)


@pytest.mark.parametrize("name", ["e4m3", "float8_e4m3fn", "e4m3fn", None])
def test_names_of_one_format_of_fp8(tmp_path: Path, name: str | None) -> None:
    """MiniMax-M2 says `e4m3`, MiniMax-M2.5 and M2.7 `float8_e4m3fn`; neither transformers nor vLLM reads it."""
    settings = {**FP8_BLOCKS, "fmt": name, "activation_scheme": "dynamic", "modules_to_not_convert": ["gate"]}
    plain = prepare_model("tiny:minimax_m2", False, tmp_path / "plain", 0)
    folder = quantize_folder(plain, tmp_path / "quantized", settings)
    assert list(find_weight_problems(folder, read_model_shape(folder))) == []
    name = "model.layers.0.self_attn.q_proj.weight"
    stored, values = (dict(HFFolderReader(path).iterate())[name] for path in (plain, folder))
    torch.testing.assert_close(values.float(), stored, rtol=0.07, atol=0.01)


@pytest.mark.parametrize(
    ("family", "tensor", "change", "reason"),
    [
        ("qwen3", "self_attn.q_proj.weight_scale_inv", None, "no tensor .*q_proj.weight_scale_inv, without which"),
        ("qwen3", "self_attn.q_proj.weight_scale_inv", torch.ones(2, 1), r"has shape \[2, 1\], but the weight implies"),
        ("llama", "self_attn.q_proj.weight_scale_inv", torch.ones(1, 1), r"has shape \[1, 1\], but the weight implies"),
        ("gpt_oss", "mlp.experts.down_proj_scales", None, "no tensor .*down_proj_scales, without which"),
        ("gpt_oss", "mlp.experts.down_proj_blocks", torch.zeros(4, 64, 1, 8, dtype=torch.uint8), "not that of blocks"),
        ("gpt_oss", "mlp.experts.down_proj_blocks", torch.zeros(4, 64, 2, 16, dtype=torch.uint8), "weight implies"),
    ],
)
def test_faults_of_scales_are_named(
    tmp_path: Path, family: str, tensor: str, change: Tensor | None, reason: str
) -> None:
    plain = prepare_model(f"tiny:{family}", False, tmp_path / "plain", 0)
    folder = quantize_folder(plain, tmp_path / "quantized", FORMS[family])
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.{tensor}"
    assert tensors.pop(name) is not None
    save_file(tensors if change is None else {**tensors, name: change}, folder / "model.safetensors")
    (problem,) = find_weight_problems(folder, read_model_shape(folder))
    assert re.search(reason, problem), problem


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantization_config \(gptq\): weights that are quantized so"),
        ({**FP8_BLOCKS, "fmt": "e5m2"}, r"quantization_config \(fp8\)"),
        ({**FP8_BLOCKS, "fmt": "float8_e5m2"}, r"quantization_config \(fp8\)"),
        ({**FP8_BLOCKS, "fmt": ["e4m3"]}, r"quantization_config \(fp8\)"),
        ({**FP8_BLOCKS, "weight_block_size": [128]}, r"weight_block_size=\[128\] of quantization_config must be two"),
        (MXFP4, r"quantization_config \(mxfp4\)"),
        ("fp8", "quantization_config: weights"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, settings: Any, reason: str) -> None:
    folder = prepare_model("tiny:qwen3", False, tmp_path, 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ValueError, match=reason):
        read_model_shape(folder)


FILE = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, paths = tmp_path_factory.mktemp("models"), dict[str, Path]()
    return lambda name: paths.setdefault(name, make_tiny_model(name, folder).path)


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
