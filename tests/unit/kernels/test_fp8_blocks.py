"""Blockwise FP8 in torch and in Triton's interpreter, against its definition in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo_kernels import fp8_blocks
from megatron_grpo_kernels.fp8_blocks import ACTIVATION_BLOCK, LARGEST, WEIGHT_BLOCK
from tests.support import fp8_oracle
from tests.support.interpreter import interpreted

BLOCKS = pytest.mark.parametrize("block", [WEIGHT_BLOCK, ACTIVATION_BLOCK], ids=["weight", "activation"])
WAYS = pytest.mark.parametrize("way", ["torch", "triton"])
SHAPES = st.tuples(st.integers(1, 140), st.integers(1, 140))


def in_triton(values: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Bits, scales, and the numbers again, [rows, columns], by the kernels."""
    from megatron_grpo_kernels import fp8_kernels

    assert type(fp8_kernels._quantise).__name__ == "InterpretedFunction"
    quantised, scales = fp8_kernels.quantise_in_triton(values, block)
    # As bytes: processes do not hand each other every float type.
    return quantised.view(torch.uint8), scales, fp8_kernels.dequantise_in_triton(quantised, scales, block, dtype)


def both_ways(way: str, values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Quantised, its scales, and the numbers again in float32, by torch or in the interpreter."""
    if way == "triton":
        bits, scales, again = interpreted(in_triton, values, block, torch.float32)
        return bits.view(torch.float8_e4m3fn), scales, again
    quantised, scales = fp8_blocks.quantise(values, block)
    return quantised, scales, fp8_blocks.dequantise(quantised, scales, block, torch.float32)


def random_matrix(shape: tuple[int, int], seed: int) -> Tensor:
    """[rows, columns], float32, sizes over many powers of two, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-14, 6, shape, generator=generator))
    return values * (torch.rand(shape, generator=generator) < 0.95)


@WAYS
@BLOCKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (128, 256)], ids=str)
def test_numbers_are_those_of_the_definition(
    shape: tuple[int, int], dtype: torch.dtype, block: tuple[int, int], way: str
) -> None:
    values = random_matrix(shape, seed=1).to(dtype)
    quantised, scales, again = both_ways(way, values, block)
    bits, expected = fp8_oracle.quantise(values, block)
    assert (quantised.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    np.testing.assert_array_equal(fp8_oracle.bits_of(quantised), bits)
    np.testing.assert_array_equal(scales.numpy(), expected)
    torch.testing.assert_close(again, fp8_oracle.dequantise(bits, expected, block), atol=0, rtol=0)


@WAYS
@BLOCKS
def test_every_number_of_the_type_stays_what_it_is(block: tuple[int, int], way: str) -> None:
    """And what lies between two goes to the nearest, a tie to the even one; 448 in each block makes its scale 1."""
    table = torch.tensor(fp8_oracle.TABLE)
    between = (table[1:] + table[:-1]) / 2
    row = torch.zeros(1, 512)
    for number, part in enumerate([table, between, between.nextafter(table[1:]), between.nextafter(table[:-1])]):
        row[0, number * 128 : number * 128 + len(part)] = part
        row[0, number * 128 + 127] = LARGEST
    values = torch.cat([row, -row])
    quantised, scales, again = both_ways(way, values, block)
    assert (scales == 1).all()
    np.testing.assert_array_equal(fp8_oracle.bits_of(quantised), fp8_oracle.quantise(values, block)[0])
    torch.testing.assert_close(again[0, : len(table)], table, atol=0, rtol=0)


@WAYS
@BLOCKS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_block_nan(value: float, block: tuple[int, int], way: str) -> None:
    values = random_matrix((130, 130), seed=2)
    values[3, 129] = value
    quantised, scales, again = both_ways(way, values, block)
    bits, expected = fp8_oracle.quantise(values, block)
    np.testing.assert_array_equal(fp8_oracle.bits_of(quantised), bits)
    np.testing.assert_array_equal(scales.numpy(), expected)
    spoilt = torch.zeros(130, 130, dtype=torch.bool)
    spoilt[3 // block[0] * block[0] : 3 // block[0] * block[0] + block[0], 128:] = True
    assert torch.equal(again.isnan(), spoilt)


@WAYS
@BLOCKS
@pytest.mark.parametrize("size", [0.0, 1e-45, 448 * 2.0**-127])
def test_nothing_and_next_to_nothing_are_zeros_with_a_scale_of_1(size: float, block: tuple[int, int], way: str) -> None:
    values = torch.full((3, 200), size)
    values[:, ::2] *= -1
    quantised, scales, again = both_ways(way, values, block)
    assert (scales == 1).all()
    assert (again == 0).all()
    assert (fp8_oracle.bits_of(quantised) & 0x7F == 0).all()


@WAYS
@BLOCKS
@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32), exponent=st.integers(-100, 100))
def test_what_comes_back_is_near(
    block: tuple[int, int], way: str, shape: tuple[int, int], seed: int, exponent: int
) -> None:
    """Half of the last of 4 bits for normal numbers; half of 2^-9 scales for those below."""
    values = random_matrix(shape, seed) * 2.0**exponent
    _, scales, again = both_ways(way, values, block)
    of_numbers = (
        scales.double().repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    )
    bound = torch.maximum(values.double().abs() * 2.0**-4, of_numbers * 2.0**-10)
    assert ((again.double() - values.double()).abs() <= bound * (1 + 2.0**-20)).all()


@BLOCKS
def test_quantising_what_was_quantised_changes_nothing(block: tuple[int, int]) -> None:
    """So a weight may be published, loaded and published again."""
    once = both_ways("torch", random_matrix((130, 257), seed=3), block)[2]
    torch.testing.assert_close(both_ways("torch", once, block)[2], once, atol=0, rtol=2.0**-22)


@BLOCKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_come_back_in_the_dtype_that_is_asked_for(block: tuple[int, int], dtype: torch.dtype) -> None:
    values = random_matrix((130, 257), seed=4)
    quantised, scales = fp8_blocks.quantise(values, block)
    exact = fp8_blocks.dequantise(quantised, scales, block, torch.float32)
    in_torch = fp8_blocks.dequantise(quantised, scales, block, dtype)
    assert torch.equal(in_torch, exact.to(dtype))
    again = interpreted(in_triton, values, block, dtype)[2]
    assert again.dtype == dtype
    # The interpreter cuts off where a GPU rounds: as far as the last bit of the dtype.
    torch.testing.assert_close(again.float(), exact, atol=1e-7, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("scales", [(1, 1), (2, 1), (3, 2)], ids=str)
def test_scales_of_another_shape_are_refused(scales: tuple[int, int]) -> None:
    quantised = torch.zeros(200, 200).to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="do not fit"):
        fp8_blocks.dequantise(quantised, torch.ones(scales), WEIGHT_BLOCK, torch.float32)
