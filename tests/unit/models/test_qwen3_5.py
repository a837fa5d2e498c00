"""Qwen3.5 and Qwen3-Next: config.json of released models, alone and beside a vision tower; costs."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from megatron_grpo.models.families import build_weight_map, measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.models.shape import DeltaShape
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from megatron_grpo.trainer.hf_export import read_carried_tensors
from tests.support.released_configs import DELTA_NETS, QWEN3_5_35B, QWEN3_NEXT_80B

CLASSES = {"qwen3_5": Qwen3_5TextConfig, "qwen3_5_moe": Qwen3_5MoeTextConfig, "qwen3_next": Qwen3NextConfig}
ARCHITECTURES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}


def as_text(family: str, **changes: Any) -> dict[str, Any]:
    """The released language model by itself."""
    raw = DELTA_NETS[family]
    text = {**raw["text_config"], "architectures": [ARCHITECTURES[family]]} if "text_config" in raw else raw
    return {**text, **changes}


@pytest.mark.parametrize("family", DELTA_NETS)
def test_released_sizes_are_read(family: str) -> None:
    shape = parse_model_shape(DELTA_NETS[family])
    heads = {"qwen3_5": 48, "qwen3_5_moe": 32, "qwen3_next": 32}[family]
    assert shape.delta == DeltaShape(key_heads=16, value_heads=heads, key_dim=128, value_dim=128, kernel=4)
    assert Counter(shape.delta_layers) == {True: shape.layers * 3 // 4, False: shape.layers // 4}
    assert (shape.head_dim, shape.rotated_dim, shape.rope_theta) == (256, 64, 1e7)
    assert shape.output_gate
    assert shape.zero_centered_norms
    assert shape.qk_norm
    assert bool(shape.text_prefix) == (family != "qwen3_next")
    prefix = shape.text_prefix or "model."
    names = measure_tensors(shape).keys()
    assert {name.rpartition("layers.")[0] for name in names if ".layers." in name} == {prefix}
    assert {f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", "lm_head.weight"} <= names
    experts = shape.experts
    assert (experts is None) == (family == "qwen3_5")
    if experts is not None:
        assert experts.shared_gate
        assert experts.normalised
        assert experts.packed == (family == "qwen3_5_moe")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_text_part_is_read_alike_alone_and_in_a_vision_model(family: str) -> None:
    inner, alone = parse_model_shape(DELTA_NETS[family]), parse_model_shape(as_text(family))
    assert replace(inner, text_prefix="") == alone


@pytest.mark.parametrize("family", CLASSES)
def test_what_config_json_leaves_out_is_what_transformers_takes(family: str) -> None:
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    short = {key: as_text(family)[key] for key in (*required, "num_experts_per_tok") if key in as_text(family)}
    short |= {"architectures": as_text(family)["architectures"]}
    if family == "qwen3_5":
        short["num_hidden_layers"] = 30  # no multiple of the pattern
    filled = CLASSES[family](**short).to_dict()
    shape = parse_model_shape(short)
    full = {name: value for name, value in filled.items() if name != "norm_topk_prob" or family == "qwen3_next"}
    assert shape == parse_model_shape(full)
    if family == "qwen3_5":
        assert shape.delta_layers[-2:] == (True, True)


def test_qwen3_next_has_the_experts_of_its_pattern() -> None:
    shape = parse_model_shape(
        {**QWEN3_NEXT_80B, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False}
    )
    assert [shape.has_experts(layer) for layer in range(5)] == [False, False, False, True, False]
    assert not shape.experts.normalised


def test_operations_of_a_delta_net_do_not_grow_with_the_sequence() -> None:
    shape = parse_model_shape(as_text("qwen3_5"))
    delta = replace(shape, delta_layers=(True,) * shape.layers)
    assert count_forward_flops(delta, [512]) == pytest.approx(2 * count_forward_flops(delta, [256]))
    # Per token and head: what the state has for the key, what is written, what it has for the query.
    state = 2 * 3 * 48 * 128 * 128
    per_layer = 5120 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48 + 48 * 128) + (2 * 16 + 48) * 128 * 4 + 3 * 5120 * 17408
    expected = 64 * (2 * per_layer + state) + 2 * 5120 * 248320
    assert count_forward_flops(delta, [1]) == pytest.approx(expected)


SMALL = {
    **dict.fromkeys(("linear_num_key_heads", "num_hidden_layers", "num_experts_per_tok", "num_key_value_heads"), 2),
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}


def make_folder(folder: Path, raw: dict[str, Any], *, packed: bool | None = None, **extra: torch.Tensor) -> None:
    """A folder of a model in bfloat16, with other tensors beside its own."""
    shape = parse_model_shape(raw)
    if packed is not None:
        assert shape.experts is not None
        shape = replace(shape, experts=replace(shape.experts, packed=packed))
    tensors = {name: torch.randn(size).bfloat16() for name, size in measure_tensors(shape).items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors | {name.replace("__", "."): value for name, value in extra.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_experts_are_read_in_the_form_of_the_folder(family: str, packed: bool, tmp_path: Path) -> None:
    raw = as_text(family, **SMALL)
    make_folder(tmp_path, raw, packed=packed)
    shape = read_model_shape(tmp_path)
    assert shape.experts.packed == packed
    assert list(find_weight_problems(tmp_path, shape)) == []
    names = {tensor.name for entry in build_weight_map(shape) for tensor in entry.hf}
    assert ("model.layers.{layer}.mlp.experts.gate_up_proj" in names) == packed


def make_vision_folder(folder: Path, **text: Any) -> dict[str, torch.Tensor]:
    """A folder with a part that sees images and one that predicts further tokens; returns these parts."""
    raw = {**QWEN3_5_35B, "text_config": {**QWEN3_5_35B["text_config"], **SMALL, **text}, "dtype": "bfloat16"}
    extra = {"model__visual__blocks__0__norm1__weight": torch.randn(3), "mtp__fc__weight": torch.randn(2, 4).bfloat16()}
    make_folder(folder, raw, **extra)
    return {name.replace("__", "."): tensor for name, tensor in extra.items()}


def test_an_export_copies_what_is_not_the_language_models(tmp_path: Path) -> None:
    extra = make_vision_folder(tmp_path / "source")
    shape = read_model_shape(tmp_path / "source")
    assert list(find_weight_problems(tmp_path / "source", shape)) == []
    carried = dict(read_carried_tensors(tmp_path / "source", shape, torch.float32))
    trained = {name: torch.ones(size) for name, size in measure_tensors(shape).items()}
    write_hf_folder([*trained.items(), *carried.items()], tmp_path / "source", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == trained.keys() | extra.keys()
    for name, tensor in extra.items():
        assert torch.equal(written[name], tensor)
        assert written[name].dtype == tensor.dtype
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("float32", "float32")
    assert config["vision_config"] == QWEN3_5_35B["vision_config"]


def test_a_tensor_that_no_part_has_is_refused(tmp_path: Path) -> None:
    make_vision_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.audio.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (text,) = find_weight_problems(tmp_path, read_model_shape(tmp_path))
    assert "model.audio.weight" in text


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_another_familys_number_of_experts_is_ignored_as_by_transformers(family: str) -> None:
    raw = as_text(family, num_local_experts=4)
    shape = parse_model_shape(raw)
    assert shape.experts.count == AutoConfig.for_model(**raw).num_experts
