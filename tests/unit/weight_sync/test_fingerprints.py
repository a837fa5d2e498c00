"""Fingerprints of weights: what differs is noticed, for every family and each box of an engine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import FAMILIES, measure_tensors
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import Activation
from megatron_grpo.planning.meta_engine import build_rank
from megatron_grpo.verification.hf_model import list_stored_tensors, load_eager_model
from megatron_grpo.verification.problem import _name_as_stored, make_model
from megatron_grpo.weight_sync import rank_checks
from megatron_grpo.weight_sync.boxes import Box, BoxLayout, Range, pack_boxes, to_slices
from megatron_grpo.weight_sync.fingerprints import (
    DIRECTIONS,
    EXACT_TOLERANCE,
    OUTPUT_TOLERANCES,
    PROBES,
    QUANTISED_TOLERANCE,
    _fingerprint_layer,
    compute_fingerprint,
    draw_probes,
    find_differing,
    is_expert,
    measure_difference,
    name_boxes,
)
from megatron_grpo.weight_sync.rank_checks import _ExpertOutput, fingerprint_policy
from megatron_grpo.weight_sync.weight_trace import trace_model
from tests.support.engine_configs import ENGINE_CONFIGS

ROWS, INPUTS = [96, 32], 300


def _between(first: Tensor, second: Tensor) -> float:
    return measure_difference(compute_fingerprint(first), compute_fingerprint(second))


def test_the_difference_is_that_of_the_norms() -> None:
    torch.manual_seed(0)
    tensor, noise = torch.randn(64, 500), torch.randn(64, 500)
    for size in (1e-6, 1e-2, 1.0):
        assert _between(tensor, tensor + size * noise) == pytest.approx(size, rel=0.6)
    estimates = [_between(tensor, tensor + 0.1 * torch.randn(64, 500)) for _ in range(100)]
    assert sum(estimates) / 100 == pytest.approx(0.1, rel=0.1)


def test_equal_numbers_have_equal_fingerprints_in_every_dtype_that_holds_them() -> None:
    tensor = torch.randn(50, 700).bfloat16()
    assert _between(tensor, tensor.float()) == 0
    assert _between(torch.zeros(3, 4), torch.zeros(3, 4)) == 0
    assert _between(torch.zeros(3, 4), torch.eye(3, 4)) == float("inf")
    vector = torch.randn(70)
    assert compute_fingerprint(vector) == compute_fingerprint(vector[:, None])


@pytest.mark.parametrize("change", ["bit", "rows", "columns", "sign", "nan"])
def test_what_a_sum_would_miss_is_seen(change: str) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(40, 1500).bfloat16()
    changed = tensor.clone()
    if change == "bit":
        changed.view(torch.int16)[7, 1200] ^= 1
    elif change == "rows":
        changed[[3, 4]] = changed[[4, 3]]
    elif change == "columns":
        changed[:, [1001, 5]] = changed[:, [5, 1001]]
    elif change == "sign":
        changed = -changed
    else:
        changed[1, 1] = torch.nan
    expected, reported = {"w": compute_fingerprint(tensor)}, {"w": [*compute_fingerprint(changed), EXACT_TOLERANCE]}
    assert list(find_differing(expected, reported)) == ["w"]
    assert not find_differing(expected, {"w": [*compute_fingerprint(tensor), EXACT_TOLERANCE]})


def test_an_expert_is_applied_to_the_probes() -> None:
    torch.manual_seed(0)
    hidden, ffn = 48, 64
    gate, up, down = torch.randn(ffn, hidden), torch.randn(ffn, hidden), torch.randn(hidden, ffn)
    total = torch.zeros(DIRECTIONS)
    for begin in (0, 32):  # the parts' outputs add up to the expert's
        rows, columns = slice(begin, begin + 32), Range(0, hidden)
        slot = Range(7, 8)

        def box(parameter: str, *ranges: Range) -> Box:
            return Box(f"experts.{parameter}_weight", "t", BoxLayout(ranges[1:], ranges, (-1, 0, 1)))

        upper = box("w13", slot, Range(32, 64), columns)
        gate_box = box("w13", slot, Range(0, 32), columns)
        lower = box("w2", slot, columns, Range(0, 32))
        expert = _ExpertOutput(hidden, "silu")
        for part in (gate_box, upper, lower):
            expert.expect(part)
        assert expert.add(upper, up[None, rows]) is None  # whichever comes first
        assert expert.add(gate_box, gate[None, rows]) is None
        output = expert.add(lower, down[None, :, rows])
        total += torch.tensor(output[:DIRECTIONS])
    inputs = draw_probes(hidden, torch.device("cpu"))
    expected = (functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
    torch.testing.assert_close(total, torch.tensor(compute_fingerprint(expected)[:DIRECTIONS]), rtol=1e-4, atol=1e-3)


def test_experts_of_one_tensor_have_biases_and_names_of_their_own() -> None:
    """The tensors have all experts, transposed, and their first matrix has gate and up by turns (gpt-oss)."""
    torch.manual_seed(0)
    hidden, ffn, count = 12, 8, 3
    tensors = {
        "experts.gate_up_proj": torch.randn(count, hidden, 2 * ffn),
        "experts.gate_up_proj_bias": torch.randn(count, 2 * ffn),
        "experts.down_proj": torch.randn(count, ffn, hidden),
        "experts.down_proj_bias": torch.randn(count, hidden),
    }
    boxes = []
    experts, slots = Range(1, 3), Range(0, 2)  # of a rank with the last two experts
    for name, parameter in zip(tensors, ("w13_weight", "w13_bias", "w2_weight", "w2_bias"), strict=True):
        rest = tuple(Range(0, size) for size in tensors[name].shape[1:])
        order = (0, 2, 1)[: len(rest) + 1] if len(rest) == 2 else (0, 1)
        boxes.append(Box(f"experts.{parameter}", name, BoxLayout((experts, *rest), (slots, *rest[::-1]), order)))
    named = list(name_boxes(boxes))
    assert [name for name, _ in named] == ["experts.1", "experts.2"] * 4
    outputs = {name: _ExpertOutput(hidden, "clamped_swiglu") for name, _ in named}
    for name, box in named:
        outputs[name].expect(box)
    outputs_by_name = {}
    for name, box in named:
        output = outputs[name].add(box, box.layout.compute(tensors[box.tensor][to_slices(box.layout.tensor)]))
        assert (output is not None) == (box.parameter == "experts.w2_bias")
        outputs_by_name[name] = output
    inputs = draw_probes(hidden, torch.device("cpu"))
    for expert in (1, 2):
        up, first_bias, down, second_bias = (tensor[expert] for tensor in tensors.values())
        expected = _multiply_by_turns(inputs @ up + first_bias) @ down + second_bias
        output = outputs_by_name[f"experts.{expert}"]
        assert output is not None
        torch.testing.assert_close(output, compute_fingerprint(expected), rtol=1e-4, atol=1e-3)


def _multiply_by_turns(projected: torch.Tensor) -> torch.Tensor:
    """GPT-OSS' activation, whose gate and up are rows by turns, as transformers has it."""
    gate, up = projected[:, ::2].clamp(max=7.0), projected[:, 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.fixture
def vllm_config(tmp_path: Path) -> Iterator[None]:
    """vLLM's configuration and groups, for layers of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    config: Any = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/meet", 0, "gloo")
        initialize_model_parallel(1, 1)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16)
        yield
        cleanup_dist_env_and_memory()


def _boxes() -> dict[str, Box]:
    boxes, begin = {}, 0
    for name, rows in zip(("gate", "up"), ROWS, strict=True):
        part = Range(0, rows), Range(0, INPUTS)
        boxes[name] = Box("gate_up.weight", name, BoxLayout(part, (Range(begin, begin + rows), part[1]), (0, 1)))
        begin += rows
    return boxes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_that_vllm_has_packed_has_the_fingerprint_of_its_weights(dtype: torch.dtype, vllm_config: None) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    weights = [torch.randn(rows, INPUTS).to(dtype) for rows in ROWS]
    layer = MergedColumnParallelLinear(INPUTS, ROWS, bias=False, params_dtype=dtype, prefix="gate_up")
    layer.weight.data.copy_(torch.cat(weights))
    layer.quant_method.process_weights_after_loading(layer)
    fingerprints = _fingerprint_layer(layer, _boxes(), dtype)
    assert not find_differing(
        {"gate": compute_fingerprint(weights[0]), "up": compute_fingerprint(weights[1])}, fingerprints
    )
    assert set(
        find_differing({"gate": compute_fingerprint(-weights[0]), "up": compute_fingerprint(weights[1])}, fingerprints)
    ) == {"gate"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_a_convolution_have_the_fingerprint_of_what_is_used(dtype: torch.dtype, vllm_config: None) -> None:
    """A delta net's convolution, whose kernels vLLM packs on CPUs that multiply in bfloat16."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    weights = torch.randn(64, 1, 4).to(dtype)
    layer: Any = ColumnParallelLinear(4, 64, bias=False, params_dtype=dtype, prefix="conv1d")
    layer.weight.data = weights.clone()
    layer.quant_method.process_weights_after_loading(layer)
    part = Range(16, 64), Range(0, 1), Range(0, 4)
    boxes = {"conv1d": Box("conv1d.weight", "conv1d.weight", BoxLayout(part, part, (0, 1, 2)))}
    expected = {"conv1d": compute_fingerprint(weights[16:])}
    assert not find_differing(expected, _fingerprint_layer(layer, boxes, dtype))
    layer.weight.data[40] = -layer.weight.data[40]
    assert list(find_differing(expected, _fingerprint_layer(layer, boxes, dtype))) == ["conv1d"]


def test_a_scale_that_was_not_refreshed_is_seen_behind_quantised_weights(vllm_config: None) -> None:
    """8-bit weights with a scale for each row, which vLLM's kernel for CPUs packs; FP8 needs AMX there."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    of_weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    of_inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": of_weights, "input_activations": of_inputs}
    config = CompressedTensorsConfig.from_config({"format": "int-quantized", "config_groups": {"group_0": group}})

    def served(weights: Tensor, scales: Tensor) -> dict[str, list[float]]:
        layer: Any = MergedColumnParallelLinear(
            INPUTS, ROWS, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="gate_up"
        )
        layer.weight.data.copy_((weights / _scales(weights)).round().to(torch.int8))
        layer.weight_scale.data.copy_(scales)
        layer.quant_method.process_weights_after_loading(layer)
        return _fingerprint_layer(layer, _boxes(), torch.bfloat16)

    before, weights = torch.randn(sum(ROWS), INPUTS), torch.randn(sum(ROWS), INPUTS)
    weights[ROWS[0] :] *= 1.5
    expected = {"gate": compute_fingerprint(weights[: ROWS[0]]), "up": compute_fingerprint(weights[ROWS[0] :])}
    healthy = served(weights, _scales(weights))
    assert not find_differing(expected, healthy)
    assert 0 < measure_difference(expected["up"], healthy["up"]) < QUANTISED_TOLERANCE / 4
    stale = _scales(weights)
    stale[ROWS[0] :] = _scales(before)[ROWS[0] :]
    assert set(find_differing(expected, served(weights, stale))) == {"up"}


def _scales(weights: Tensor) -> Tensor:
    """[rows, 1]: largest absolute value of each row / 63.

    Processors without VNNI add pairs of 8-bit products in 16 bits, which saturate where weights have the whole range.
    """
    return weights.abs().amax(dim=1, keepdim=True) / 63


NAMES = [name for name in ENGINE_CONFIGS if not name.endswith("_vision")]


def test_the_models_are_of_every_family_and_their_experts_of_every_activation(tmp_path: Path) -> None:
    assert FAMILIES.keys() <= set(NAMES)
    activations = set()
    for name in NAMES:
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(ENGINE_CONFIGS[name]))
        shape = read_model_shape(folder)
        if shape.experts is not None:
            activations.add(shape.activation)
    assert activations == set(get_args(Activation))


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_of_an_engine_is_compared(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("qwen3_5"):
        pytest.importorskip("torchvision")  # vLLM's module of these models imports it
    folder = make_model({**ENGINE_CONFIGS[name], "pad_token_id": None}, tmp_path / "model", seed=0)
    shape, model = read_model_shape(folder), load_eager_model(folder, torch.float32)
    stored = {key: value.detach().clone() for key, value in list_stored_tensors(model).items()}
    tensors = _name_as_stored(model, stored, shape)
    monkeypatch.setattr(
        rank_checks, "iter_hf_tensors", lambda *_: ((key, tensors[key]) for key in measure_tensors(shape))
    )
    boxes = trace_engine(folder, measure_tensors(shape))
    rank: Any = SimpleNamespace(shape=shape, gather_chunks=list)
    (fingerprints,) = fingerprint_policy(rank, [pack_boxes(boxes)])
    assert fingerprints.keys() == {key for key, _ in name_boxes(boxes)}
    for key, box in name_boxes(boxes):
        if not is_expert(box):
            values = compute_fingerprint(box.layout.compute(tensors[box.tensor][to_slices(box.layout.tensor)]))
            assert measure_difference(values, fingerprints[key]) == 0, key
    outputs = dict(compute_experts(model))
    by_expert = {read_numbers(key): key for key in {key for key, box in name_boxes(boxes) if is_expert(box)}}
    assert by_expert.keys() == outputs.keys()
    assert (shape.experts is None) == (not outputs)
    for numbers, output in outputs.items():
        actual = fingerprints[by_expert[numbers]]
        assert measure_difference(compute_fingerprint(output), actual) < OUTPUT_TOLERANCES[torch.float32], numbers


def trace_engine(folder: Path, sizes: dict[str, tuple[int, ...]]) -> list[Box]:
    """Trace vLLM's loaders of an engine of one rank."""
    from vllm.config import set_current_vllm_config

    with (
        build_rank(folder, 0, GenerationParallelConfig(), "float32") as (model, config),
        set_current_vllm_config(config),
    ):
        trace = trace_model(model, sizes, torch.float32)
    assert trace.unexplained == {}
    return list(trace.boxes)


def read_numbers(key: str) -> tuple[int, int]:
    """Layer and expert of a fingerprint's name."""
    match = re.search(r"layers\.(\d+)\..*experts\.(\d+)", key)
    assert match is not None, key
    return int(match[1]), int(match[2])


@torch.no_grad()
def compute_experts(model: nn.Module) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Apply each expert of transformers' model to the probes."""
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("Experts"):
            continue
        layer = int(re.findall(r"layers\.(\d+)\.", name)[0])
        weight = module.down_proj
        is_llama4, count = type(module).__name__ == "Llama4TextExperts", len(weight)
        hidden = weight.shape[-1] if is_llama4 or "GptOss" in type(module).__name__ else weight.shape[1]
        probes = draw_probes(hidden, torch.device("cpu"))
        if is_llama4:  # which takes the tokens of all experts, one behind the other
            parts = module(probes.repeat(count, 1)).split(PROBES)
            yield from (((layer, number), part) for number, part in enumerate(parts))
            continue
        for number in range(count):
            chosen = torch.full((PROBES, 1), number)
            yield (layer, number), module(probes, chosen, torch.ones(PROBES, 1))
