"""Nemotron-H and Nemotron 3: config.json in all spellings, weights by name, layouts, operations."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.models.shape import MambaShape, ModelShape
from megatron_grpo.planning.estimates import count_layer_parameters
from megatron_grpo.planning.generation_cost import count_kv_bytes_per_token, count_state_bytes
from megatron_grpo.preflight.layout_checks import check_split
from megatron_grpo.trainer.hf_export import find_changed_settings
from megatron_grpo.verification.hf_model import load_eager_model
from megatron_grpo.verification.problem import prepare_model
from tests.support.released_configs import NANO, NANO_9B, SUPER

PATTERN = NANO["hybrid_override_pattern"]
NAMES = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
OLD_NAMES = NAMES | {"M": "mamba", "*": "attention"}


def test_released_models_are_read() -> None:
    nano, dense, large = map(parse_model_shape, (NANO, NANO_9B, SUPER))
    assert nano.mamba == MambaShape(heads=64, groups=8, head_dim=64, state=128, kernel=4)
    assert [nano.count_layers(kind) for kind in ("mamba", "attention", "experts", "dense")] == [23, 6, 23, 0]
    assert [dense.count_layers(kind) for kind in ("mamba", "attention", "experts", "dense")] == [27, 4, 0, 25]
    assert (nano.experts.latent, large.experts.latent, large.experts.top_k) == (None, 1024, 22)
    assert large.count_layers("latent_experts") == large.count_layers("experts") == 40
    assert not nano.has_gates
    assert nano.list_kinds(0) == {"mixer", "mamba"}
    assert nano.list_kinds(1) == {"mlp", "experts", "single_experts"}


@pytest.mark.parametrize("raw", [NANO, NANO_9B, SUPER], ids=["nano", "nano_9b", "super"])
def test_tensors_are_those_of_transformers(raw: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    stored = revert_weight_conversion(model, dict(model.state_dict()))
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == measure_tensors(parse_model_shape(raw))


def compute_token_by_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' decoding, which bounds no step but the first token's: [tokens, vocabulary]."""
    cache, logits = None, []
    for token in ids:
        output = model(token[None, None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0, 0])
    return torch.stack(logits)


@pytest.mark.parametrize("entries", [{}, {"mamba_dt_min": 0.001}, {"time_step_limit": [0.001, 1.0]}])
@torch.no_grad()
def test_transformers_computes_an_export_without_a_lower_bound_of_time_steps(
    entries: dict[str, Any], tmp_path: Path
) -> None:
    """As it decodes and as vLLM computes; of the folder itself it raises the steps of a prompt."""
    folder = prepare_model("tiny:nemotron_h", False, tmp_path / "model", 0)
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | entries
    file.write_text(json.dumps(raw))
    ids = torch.arange(1, 40)
    unbounded = AutoModelForCausalLM.from_pretrained(folder).eval()
    bounded = unbounded(ids[None]).logits[0]
    for module in unbounded.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    expected = unbounded(ids[None]).logits[0]
    assert (bounded - expected).abs().max() > 1e-3
    torch.testing.assert_close(compute_token_by_token(unbounded, ids), expected, atol=2e-5, rtol=0)
    write_hf_folder(
        ((name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()),
        folder,
        tmp_path / "export",
        settings=find_changed_settings(folder, read_model_shape(folder)),
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    torch.testing.assert_close(exported(ids[None]).logits[0], expected, atol=2e-5, rtol=0)
    oracle = load_eager_model(folder, torch.float32)
    torch.testing.assert_close(oracle(ids[None]).logits[0], expected, atol=2e-5, rtol=0)
    AutoModelForCausalLM.from_config(exported.config)  # initialises weights of its own


@pytest.mark.parametrize(("key", "names"), [("layers_block_type", NAMES), ("layer_types", OLD_NAMES)])
def test_lists_and_the_pattern_mean_the_same(key: str, names: dict[str, str]) -> None:
    rest = {name: value for name, value in NANO.items() if name != "hybrid_override_pattern"}
    assert parse_model_shape(rest | {key: [names[letter] for letter in PATTERN]}) == parse_model_shape(NANO)


def list_problems(shape: ModelShape, **sizes: int) -> list[str]:
    parallel = ParallelConfig(sequence=sizes.get("tensor", 1) > 1, **sizes)
    return [f"{key} {text}" for is_broken, key, text in check_split("policy.parallel", parallel, shape) if is_broken]


def test_layouts_split_groups_and_their_heads() -> None:
    shape = parse_model_shape(NANO)
    assert not list_problems(shape, tensor=2, context=4)
    assert not list_problems(shape, tensor=8, context=2)  # two ranks share a group
    (text,) = list_problems(shape, tensor=16)
    assert "does not divide the model's 8 groups of Mamba; use 1, 2, 4 or 8" in text
    three = replace(shape, mamba=MambaShape(heads=36, groups=6, head_dim=64, state=128, kernel=4))
    assert not list_problems(three, context=12)
    (text,) = list_problems(three, context=4)
    assert "policy.parallel.context=4 does not divide the 36 heads of Mamba of a tensor-parallel rank into" in text
    assert text.endswith("whole groups of 6, or into equal parts of them; use 1, 2, 3, 6, 12, 18 or 36")


def test_costs_are_those_of_each_kind_of_layer() -> None:
    shape = parse_model_shape(NANO_9B)
    tensors = {name: torch.Size(size).numel() for name, size in measure_tensors(shape).items() if len(size) == 2}
    matrices = sum(count for name, count in tensors.items() if ".layers." in name)
    dense, routed = count_layer_parameters(shape, range(shape.layers))
    assert (dense, routed) == (matrices, 0)
    # A token is multiplied with every matrix, writes to each state and reads it; four layers have attention.
    head, kernel = tensors["lm_head.weight"], shape.mamba.channels * 4
    mamba = 27 * (kernel + 2 * 128 * 80 * 128)
    pairs = 4 * 2 * 128 * 40 * (100 * 101 // 2 + 1)
    assert count_forward_flops(shape, [100, 1]) == 2.0 * (matrices + head + mamba) * 101 + 2.0 * pairs
    assert count_kv_bytes_per_token(shape, 4, 1, 2) == 4 * 2 * 8 * 128 * 2
    states = shape.count_layers("mamba") * (4 * 128 * 80 * 128 + 2 * 3 * 12288)
    assert count_state_bytes(shape, range(shape.layers), 1, 2) == states
