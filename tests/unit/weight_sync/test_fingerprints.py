"""Fingerprints of matrices, and of the weights that vLLM's layers have packed or quantised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_grpo.models.weight_layouts import Destination
from megatron_grpo.models.weight_map import WeightSlice
from megatron_grpo.weight_sync.fingerprints import (
    DIRECTIONS,
    EXACT_TOLERANCE,
    QUANTISED_TOLERANCE,
    _fingerprint_layer,
    compute_fingerprint,
    draw_probes,
    find_differing,
    measure_difference,
)
from megatron_grpo.weight_sync.rank_checks import _ExpertOutputs

ROWS, INPUTS = [96, 32], 300


def _between(one: Tensor, other: Tensor) -> float:
    return measure_difference(compute_fingerprint(one), compute_fingerprint(other))


def test_the_difference_is_that_of_the_norms() -> None:
    torch.manual_seed(0)
    one, noise = torch.randn(64, 500), torch.randn(64, 500)
    for size in (1e-6, 1e-2, 1.0):
        assert _between(one, one + size * noise) == pytest.approx(size, rel=0.6)
    estimates = [_between(one, one + 0.1 * torch.randn(64, 500)) for _ in range(100)]
    assert sum(estimates) / 100 == pytest.approx(0.1, rel=0.1)


def test_equal_numbers_have_equal_fingerprints_in_every_dtype_that_holds_them() -> None:
    one = torch.randn(50, 700).bfloat16()
    assert _between(one, one.float()) == 0
    assert _between(torch.zeros(3, 4), torch.zeros(3, 4)) == 0
    assert _between(torch.zeros(3, 4), torch.eye(3, 4)) == float("inf")
    vector = torch.randn(70)
    assert compute_fingerprint(vector) == compute_fingerprint(vector[:, None])


@pytest.mark.parametrize("change", ["bit", "rows", "columns", "sign", "nan"])
def test_what_a_sum_would_miss_is_seen(change: str) -> None:
    torch.manual_seed(0)
    one = torch.randn(40, 1500).bfloat16()
    other = one.clone()
    if change == "bit":
        other.view(torch.int16)[7, 1200] ^= 1
    elif change == "rows":
        other[[3, 4]] = other[[4, 3]]
    elif change == "columns":
        other[:, [1001, 5]] = other[:, [5, 1001]]
    elif change == "sign":
        other = -other
    else:
        other[1, 1] = torch.nan
    expected, found = {"w": compute_fingerprint(one)}, {"w": [*compute_fingerprint(other), EXACT_TOLERANCE]}
    assert list(find_differing(expected, found)) == ["w"]
    assert not find_differing(expected, {"w": [*compute_fingerprint(one), EXACT_TOLERANCE]})


def test_an_expert_is_applied_to_the_probes() -> None:
    torch.manual_seed(0)
    hidden, ffn = 48, 64
    gate, up, down = torch.randn(ffn, hidden), torch.randn(ffn, hidden), torch.randn(hidden, ffn)
    experts = _ExpertOutputs(hidden, functional.silu)

    def part(name: str, parameter: str, begin: int) -> Destination:
        tensor = WeightSlice(f"model.layers.0.mlp.experts.7.{name}.weight", (64,), ((begin, begin + 32),))
        return Destination(f"model.layers.0.mlp.experts.routed_experts.{parameter}_weight", tensor, 0, 7)

    total = torch.zeros(DIRECTIONS)
    for name, parameter, matrix in (("w1", "w13", gate), ("w3", "w13", up)):  # Mixtral's names of gate and up
        for begin in (0, 32):
            assert experts.add(part(name, parameter, begin), matrix[begin : begin + 32]) is None
    for begin in (0, 32):  # the parts' outputs add up to the expert's
        found = experts.add(part("w2", "w2", begin), down[:, begin : begin + 32])
        total += torch.tensor(found[:DIRECTIONS])
    inputs = draw_probes(hidden, torch.device("cpu"))
    whole = (functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
    torch.testing.assert_close(total, torch.tensor(compute_fingerprint(whole)[:DIRECTIONS]), rtol=1e-4, atol=1e-3)


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


def _parts() -> list[Destination]:
    names, begins = ("gate", "up"), (0, ROWS[0])
    return [
        Destination("gate_up.weight", WeightSlice(name, (rows, INPUTS), ((0, rows), (0, INPUTS))), begin, None)
        for name, rows, begin in zip(names, ROWS, begins, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_that_vllm_has_packed_has_the_fingerprint_of_its_weights(dtype: torch.dtype, vllm_config: None) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    weights = [torch.randn(rows, INPUTS).to(dtype) for rows in ROWS]
    layer = MergedColumnParallelLinear(INPUTS, ROWS, bias=False, params_dtype=dtype, prefix="gate_up")
    layer.weight.data.copy_(torch.cat(weights))
    layer.quant_method.process_weights_after_loading(layer)
    found = _fingerprint_layer(layer, _parts(), dtype)
    assert not find_differing({"gate": compute_fingerprint(weights[0]), "up": compute_fingerprint(weights[1])}, found)
    assert set(
        find_differing({"gate": compute_fingerprint(-weights[0]), "up": compute_fingerprint(weights[1])}, found)
    ) == {"gate"}


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
        return _fingerprint_layer(layer, _parts(), torch.bfloat16)

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
    """[rows, 1]: largest absolute value of each row / 127."""
    return weights.abs().amax(dim=1, keepdim=True) / 127
