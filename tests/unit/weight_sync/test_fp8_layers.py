"""Numbers and scales written into vLLM's own FP8 layers, against vLLM's own rounding of the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_grpo.weight_sync.engine_layers import RebuiltLayer, name_scales, uses_fp8_blocks
from megatron_grpo_kernels.fp8_blocks import quantise

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU kernels multiply by FP8 blocks with AMX"
)
INPUTS, OUTPUTS = 256, [256, 128]


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[Any]:
    """Two matrices side by side in one of vLLM's layers, which it rounds when it loads them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config: Any = VllmConfig()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"file://{tmp_path}/meet", 0, "gloo")
        initialize_model_parallel(1, 1)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16)
        blocks = OnlineQuantizationConfig(QuantizationConfigArgs(linear="fp8_per_block"))
        made = MergedColumnParallelLinear(INPUTS, OUTPUTS, bias=False, quant_config=blocks, prefix="mlp.gate_up_proj")
        record_metadata_for_reloading(made)
        _load(made, _weights(seed=0))
        yield made
        cleanup_dist_env_and_memory()


def test_what_is_rounded_before_lands_as_vllm_would_have_rounded_it(layer: Any) -> None:
    inputs = torch.randn(5, INPUTS, dtype=torch.bfloat16)
    before, kept = layer(inputs)[0], {name: one.data_ptr() for name, one in layer.named_parameters()}
    weights = _weights(seed=1)
    rebuilt = RebuiltLayer(layer)
    rebuilt.open().weight.data.copy_(torch.cat(weights))
    rebuilt.close()
    rounded_there = layer(inputs)[0]
    assert not torch.equal(rounded_there, before)

    _write(layer, _weights(seed=0))
    assert torch.equal(layer(inputs)[0], before), "vLLM rounded these when it loaded them"
    _write(layer, weights)
    assert torch.equal(layer(inputs)[0], rounded_there)
    exact = inputs.float() @ torch.cat(weights).float().T
    assert (rounded_there.float() - exact).abs().max() < 0.02 * exact.abs().max(), "the weights are FP8 numbers"
    assert {name: one.data_ptr() for name, one in layer.named_parameters()} == kept, "in the memory that was there"


def test_a_layer_that_was_begun_is_put_back(layer: Any) -> None:
    inputs = torch.randn(5, INPUTS, dtype=torch.bfloat16)
    before = layer(inputs)[0]
    blocked = RebuiltLayer(layer, ["weight"])
    blocked.open().weight.data.zero_()
    blocked.abandon()
    assert torch.equal(layer(inputs)[0], before)


def test_other_layers_are_told_apart(layer: Any) -> None:
    assert uses_fp8_blocks(layer)
    assert not uses_fp8_blocks(nn.Linear(2, 2))


def _weights(seed: int) -> list[Tensor]:
    """The matrices, bfloat16: E4M3 numbers times 2^-10, in every block the largest, so that rounding is exact."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for rows in OUTPUTS:
        numbers = (torch.randn(rows, INPUTS, generator=generator) * 100).clamp(-448, 448)
        numbers[::128, ::128] = 448.0
        made.append((numbers.to(torch.float8_e4m3fn).float() / 1024).bfloat16())
    return made


def _load(layer: Any, weights: list[Tensor]) -> None:
    for number, matrix in enumerate(weights):
        layer.weight.weight_loader(layer.weight, matrix, number)


def _write(layer: Any, weights: list[Tensor]) -> None:
    """As a refit brings them: rounded a matrix at a time, numbers and scales."""
    blocked, row = RebuiltLayer(layer, ["weight"]), 0
    for matrix in weights:
        numbers, scales = quantise(matrix)
        opened = blocked.open()
        opened.weight.data[row : row + len(matrix)].copy_(numbers)
        getattr(opened, name_scales("weight")).data[row // 128 : row // 128 + len(scales)].copy_(scales)
        row += len(matrix)
    blocked.close()
