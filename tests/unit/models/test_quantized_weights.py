"""Weights in FP8 and MXFP4 are read as the numbers that transformers makes of them, box by box."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_grpo.models.families import read_model_shape
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.quantized_weights import is_quantized
from megatron_grpo.models.weight_map import WeightSlice
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from megatron_grpo.verification.problem import prepare_model
from tests.support.quantized_folders import FP8_BLOCKS, FP8_WHOLE, MXFP4, quantize_folder, to_fp8


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
