"""Blockwise FP8 in torch and in Triton's interpreter, against its definition in loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo_kernels import fp8_blocks
from megatron_grpo_kernels.fp8_format import BLOCK, LARGEST
from tests.support import fp8_oracle
from tests.support.interpreter import run_interpreted

WAYS = pytest.mark.parametrize("way", ["torch", "triton"])
SHAPES = st.tuples(st.integers(1, 140), st.integers(1, 140))


def in_triton(values: Tensor) -> tuple[Tensor, Tensor]:
    """Bits and scales, by the kernel."""
    from megatron_grpo_kernels import fp8_kernels

    assert type(fp8_kernels._quantise).__name__ == "InterpretedFunction"
    quantised, scales = fp8_kernels.quantise_in_triton(values)
    return quantised.view(torch.uint8), scales  # as bytes: processes do not hand each other every float type


def both_ways(way: str, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantised by torch or in the interpreter, its scales, and the numbers again in float32."""
    if way == "triton":
        bits, scales = run_interpreted(in_triton, values)
        quantised = bits.view(torch.float8_e4m3fn)
    else:
        quantised, scales = fp8_blocks.quantise(values)
    return quantised, scales, fp8_oracle.dequantise(fp8_oracle.bits_of(quantised), scales.numpy())


def random_matrix(shape: tuple[int, int], seed: int) -> Tensor:
    """[rows, columns], float32, sizes over many powers of two, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-14, 6, shape, generator=generator))
    return values * (torch.rand(shape, generator=generator) < 0.95)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (128, 256)], ids=str)
def test_numbers_are_those_of_the_definition(shape: tuple[int, int], dtype: torch.dtype, way: str) -> None:
    values = random_matrix(shape, seed=1).to(dtype)
    quantised, scales, _ = both_ways(way, values)
    bits, expected = fp8_oracle.quantise(values)
    assert (quantised.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    np.testing.assert_array_equal(fp8_oracle.bits_of(quantised), bits)
    np.testing.assert_array_equal(scales.numpy(), expected)


@WAYS
def test_every_number_of_the_type_stays_what_it_is(way: str) -> None:
    """What lies between two goes to the nearest, a tie to the even one; 448 makes the scale 1."""
    table = torch.tensor(fp8_oracle.TABLE)
    between = (table[1:] + table[:-1]) / 2
    row = torch.zeros(1, 512)
    for number, part in enumerate([table, between, between.nextafter(table[1:]), between.nextafter(table[:-1])]):
        row[0, number * 128 : number * 128 + len(part)] = part
        row[0, number * 128 + 127] = LARGEST
    values = torch.cat([row, -row])
    quantised, scales, again = both_ways(way, values)
    assert (scales == 1).all()
    np.testing.assert_array_equal(fp8_oracle.bits_of(quantised), fp8_oracle.quantise(values)[0])
    torch.testing.assert_close(again[0, : len(table)], table, atol=0, rtol=0)


@WAYS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_block_nan(value: float, way: str) -> None:
    values = random_matrix((130, 130), seed=2)
    values[3, 129] = value
    quantised, scales, again = both_ways(way, values)
    bits, expected = fp8_oracle.quantise(values)
    np.testing.assert_array_equal(fp8_oracle.bits_of(quantised), bits)
    np.testing.assert_array_equal(scales.numpy(), expected)
    spoilt = torch.zeros(130, 130, dtype=torch.bool)
    spoilt[3 // BLOCK * BLOCK : 3 // BLOCK * BLOCK + BLOCK, 128:] = True
    assert torch.equal(again.isnan(), spoilt)


@WAYS
@pytest.mark.parametrize("size", [0.0, 1e-45, 448 * 2.0**-127])
def test_nothing_and_next_to_nothing_are_zeros_with_a_scale_of_1(size: float, way: str) -> None:
    values = torch.full((3, 200), size)
    values[:, ::2] *= -1
    quantised, scales, again = both_ways(way, values)
    assert (scales == 1).all()
    assert (again == 0).all()
    assert (fp8_oracle.bits_of(quantised) & 0x7F == 0).all()


@WAYS
@settings(max_examples=25)
@given(shape=SHAPES, seed=st.integers(0, 2**32), exponent=st.integers(-100, 100))
def test_what_comes_back_is_near(way: str, shape: tuple[int, int], seed: int, exponent: int) -> None:
    """Half of the last of 4 bits for normal numbers; half of 2^-9 scales for those below."""
    values = random_matrix(shape, seed) * 2.0**exponent
    _, scales, again = both_ways(way, values)
    of_numbers = scales.double().repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
    bound = torch.maximum(values.double().abs() * 2.0**-4, of_numbers * 2.0**-10)
    assert ((again.double() - values.double()).abs() <= bound * (1 + 2.0**-20)).all()


def test_quantising_what_was_quantised_changes_nothing() -> None:
    """So a weight may be published, loaded and published again."""
    once = both_ways("torch", random_matrix((130, 257), seed=3))[2]
    torch.testing.assert_close(both_ways("torch", once)[2], once, atol=0, rtol=2.0**-22)
