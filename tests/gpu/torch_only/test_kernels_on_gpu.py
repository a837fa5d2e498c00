"""The Triton kernels on a GPU: the cases of the interpreter's tests, larger ones, and how much memory they take."""

import pytest
import torch
from torch import Tensor

from megatron_grpo_kernels import fp8_blocks, fp8_kernels
from megatron_grpo_kernels.logprob import linear_logprobs
from tests.support.logprob_cases import CASES, Case, by_float64, by_kernel, expect_equal


@pytest.mark.parametrize("kernel", ["fused", "chunked"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float32"])
def test_values_and_gradients_equal_those_of_the_whole_logits(name: str, kernel: str, device: str) -> None:
    case = CASES[name]
    expect_equal(by_kernel(case, kernel, device), by_float64(case), case)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype != "float32"])
def test_logits_of_the_fused_kernel_are_not_rounded_to_16_bits(name: str, device: str) -> None:
    case = CASES[name]
    expect_equal(by_kernel(case, "fused", device), by_float64(case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_of_many_tiles(dtype: str) -> None:
    case = Case(dtype=dtype, tokens=1000, hidden=1024, vocab=32_000, padding=128, spread=0.05)
    expect_equal(by_kernel(case, "fused", "cuda"), by_float64(case), case)


@pytest.mark.gpu
def test_results_repeat_bit_by_bit() -> None:
    case = Case(dtype="bfloat16", tokens=1000, hidden=512, vocab=20_000)
    first, second = (by_kernel(case, "fused", "cuda") for _ in range(2))
    for name in ("logprobs", "entropy", "of_hidden", "of_weight"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.gpu
def test_a_gpu_gets_the_fused_kernel_by_itself() -> None:
    case = Case(dtype="bfloat16")
    assert torch.equal(by_kernel(case, "auto", "cuda").logprobs, by_kernel(case, "fused", "cuda").logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fused", "chunked"])
def test_memory_is_an_eighth_of_what_whole_logits_take(kernel: str) -> None:
    """Of 8192 tokens, 2458 in the loss: a plain implementation holds float32 logits of all, and two copies of them."""
    tokens, vocab, hidden = 2458, 151_936, 1024
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, device="cuda", dtype=torch.int64)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprobs(states, weight, targets, kernel=kernel)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 3 * 4 * 8192 * vocab / 8


def matrix(device: str) -> Tensor:
    """[300, 700], float32: sizes over many powers of two, zeros, and a number that is not finite."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 20, (300, 700), generator=generator)
    values = torch.randn(300, 700, generator=generator) * torch.exp2(exponents)
    values[:128, :128] = 0
    values[250, 650] = torch.inf
    return values.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_equals_torch_bit_by_bit(dtype: torch.dtype, device: str) -> None:
    values = matrix(device).to(dtype)
    quantised, scales = fp8_kernels.quantise_in_triton(values)
    expected, of_blocks = fp8_blocks.quantise_in_torch(values)
    torch.testing.assert_close(scales, of_blocks, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(quantised.float(), expected.float(), atol=0, rtol=0, equal_nan=True)
