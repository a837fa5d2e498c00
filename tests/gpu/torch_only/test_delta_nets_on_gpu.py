"""Delta nets by the kernels of flash-linear-attention and by torch's functions: the recurrence, and a layer's time."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common
from torch import Tensor

from megatron_grpo.trainer.model.delta_net import compute_delta_rule, convolve_packed, normalize_vectors
from tests.unit.trainer.test_delta_rule import step_by_step

HEADS, SIZE = 4, 128  # Qwen3.5's heads are of 128
LENGTHS = [65, 1, 200]
LONG = 10_240
"""Tokens of the sequence that is timed, with 16 heads."""


def draw(lengths: list[int], heads: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Inputs of the rule for packed sequences, and the sequences' ends, int32."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    query, key, value = (torch.randn(1, tokens, heads, SIZE, generator=generator) for _ in range(3))
    decay, strength = (
        -torch.rand(1, tokens, heads, generator=generator),
        torch.rand(1, tokens, heads, generator=generator),
    )
    vectors = [normalize_vectors(query), normalize_vectors(key), value]
    inputs = [*(tensor.to(device, dtype) for tensor in vectors), decay.to(device), strength.to(device, dtype)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return [tensor.requires_grad_() for tensor in inputs], ends


def list_rules() -> list[Callable[..., Any]]:
    rules: list[Callable[..., Any]] = [compute_delta_rule]
    return rules if not torch.cuda.is_available() else [common.chunk_gated_delta_rule, *rules]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_compute_the_recurrence_and_its_gradients(dtype: torch.dtype, device: str) -> None:
    """That of the same rounded inputs in float64."""
    inputs, ends = draw(LENGTHS, HEADS, device, dtype)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in inputs]
    expected = step_by_step(exact, ends.cpu())
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    tolerance = 0.03 if dtype == torch.bfloat16 or device == "cuda" else 1e-4  # kernels multiply in TF32
    for rule in list_rules():
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        query, key, value, decay, strength = leaves
        output, _ = rule(query, key, value, g=decay, beta=strength, cu_seqlens=ends)
        (output.float() * weights.to(device).float()).sum().backward()
        pairs = [(output, expected), *((ours.grad, theirs.grad) for ours, theirs in zip(leaves, exact, strict=True))]
        for ours, theirs in pairs:
            assert ours is not None
            assert theirs is not None
            difference = (ours.detach().double().cpu() - theirs.detach()).norm() / theirs.norm()
            assert difference < tolerance, (rule, difference)


def test_the_convolution_is_that_of_torch(device: str) -> None:
    x = torch.randn(1, sum(LENGTHS), 64, device=device)
    weight = torch.randn(64, 4, device=device)
    ends = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    expected, _ = convolve_packed(x, weight, cu_seqlens=ends)
    convolve = common.causal_conv1d if device == "cuda" else convolve_packed
    actual, _ = convolve(x=x, weight=weight, bias=None, activation="silu", cu_seqlens=ends)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_the_kernels_are_faster_than_torch(record_property: Callable[[str, object], None]) -> None:
    inputs, ends = draw([LONG], 16, "cuda", torch.bfloat16)
    query, key, value, decay, strength = inputs
    seconds = []
    for rule in list_rules():
        for _ in range(2):  # the first call compiles
            torch.cuda.synchronize()
            began = time.monotonic()
            output, _ = rule(query, key, value, g=decay, beta=strength, cu_seqlens=ends)
            output.float().sum().backward()
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    record_property("seconds of the kernels and of torch, forward and backward", seconds)
    assert seconds[0] < seconds[1] / 3
