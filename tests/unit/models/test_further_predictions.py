"""Layers that predict further tokens (MTP): exports copy them, and engines need them to propose tokens with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import is_carried, measure_tensors, parse_model_shape, read_model_shape
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.preflight.model_file_checks import find_draft_problems, find_weight_problems
from megatron_grpo.trainer.hf_export import build_quantization_config, find_changed_settings, read_carried_tensors
from megatron_grpo.verification.problem import prepare_model
from tests.support.quantized_folders import FP8_BLOCKS, to_fp8

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
        kept = {name: tensor for name, tensor in tensors.items() if name not in extra}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    config, shape = Config(), read_model_shape(tmp_path)
    assert list(find_draft_problems(config, tmp_path, shape)) == []
    config.generation.engine.speculative.method = "mtp"
    config.generation.engine.speculative.num_speculative_tokens = 1
    problems = list(find_draft_problems(config, tmp_path, shape))
    assert [problem.subject for problem in problems] == ["generation.engine.speculative.method=mtp"] * (
        text is not None
    )
    assert all(text is not None and text in problem.text and "use ngram" in problem.text for problem in problems)
