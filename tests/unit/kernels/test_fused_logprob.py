"""The fused kernel in Triton's interpreter, against whole logits in float64."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.interpreter import interpreted_on_ranks, run_interpreted
from tests.support.logprob_cases import CASES, Case, Results, by_float64, by_kernel, by_ranks, expect_equal


def compute_fused(case: Case, programs: int) -> Results:
    """By the fused kernel, which splits the vocabulary so that it starts about so many programs."""
    from megatron_grpo_kernels import fused_logprob

    assert type(fused_logprob._reduce_logits).__name__ == "InterpretedFunction"
    before, fused_logprob.PROGRAMS = fused_logprob.PROGRAMS, programs
    try:
        return by_kernel(case, "fused")
    finally:
        fused_logprob.PROGRAMS = before


@pytest.mark.parametrize("programs", [1, 8, 1024])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_those_of_the_whole_logits(name: str, programs: int) -> None:
    case = CASES[name]
    actual = run_interpreted(compute_fused, case, programs)
    expect_equal(actual, by_float64(case), case)
    assert (actual.of_weight[case.vocab :] == 0).all(), "padding rows got a gradient"


def blocks_of(case: Case, numbers: int) -> tuple[Results, list[int]]:
    """The results, and widths of the blocks of gradients that the backward pass holds when it may hold so many."""
    from megatron_grpo_kernels import fused_logprob

    rows: list[int] = []
    original = fused_logprob._multiply

    def watched(factor: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        rows.append(factor.shape[1])
        return original(factor, right)

    before = fused_logprob.CHUNK_NUMBERS
    fused_logprob.CHUNK_NUMBERS, fused_logprob._multiply = numbers, watched
    try:
        return by_kernel(case, "fused"), rows
    finally:
        fused_logprob.CHUNK_NUMBERS, fused_logprob._multiply = before, original


def test_the_backward_pass_holds_a_block_at_a_time() -> None:
    case = Case()
    results, rows = run_interpreted(blocks_of, case, 130 * case.tokens)
    assert rows == [128, 128, 44]
    expect_equal(results, by_float64(case), case)


@pytest.mark.parametrize("kernel", ["fused", "chunked"])
@pytest.mark.parametrize("columns", [(200, 100), (70, 230), (300, 0)], ids=str)
def test_the_split_vocabulary_is_the_whole_one(columns: tuple[int, int], kernel: str, tmp_path: Path) -> None:
    """(300, 0): the second rank has nothing but padding."""
    case = Case()
    parts: list[Results] = interpreted_on_ranks(2, by_ranks, case, kernel, str(tmp_path / "store"), columns)
    full = by_float64(case)
    rows = torch.cat([part.of_weight[:count] for part, count in zip(parts, columns, strict=True)])
    of_weight = torch.cat([rows, torch.zeros(case.padding, case.hidden)])
    for part in parts:
        joined = Results(part.logprobs, part.entropy, parts[0].of_hidden + parts[1].of_hidden, of_weight)
        expect_equal(joined, full, case)
    for part, count in zip(parts, columns, strict=True):
        assert (part.of_weight[count:] == 0).all(), "padding rows got a gradient"


def with_a_bad_token(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies where the second of three tokens has a hidden state with this number in it."""
    from megatron_grpo_kernels.logprob import linear_logprobs

    hidden = torch.ones(3, 4)
    hidden[1, 2] = value
    return linear_logprobs(hidden, torch.rand(5, 4), torch.tensor([0, 1, 2]), kernel="fused")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_hidden(value: float) -> None:
    for result in run_interpreted(with_a_bad_token, value):
        assert result.isnan().tolist() == [False, True, False]


def fused_without_interpreter() -> str:
    """What the fused kernel says to tensors on a CPU outside the interpreter."""
    import triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        with pytest.raises(ValueError, match="fused") as caught:
            by_kernel(Case(), "fused")
    return str(caught.value)


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    text = run_interpreted(fused_without_interpreter)
    assert "use policy.logprob_kernel=chunked, or set TRITON_INTERPRET=1" in text


def test_float64_is_refused_by_the_fused_kernel() -> None:
    with pytest.raises(ValueError, match=r"float64.* use policy\.logprob_kernel=chunked"):
        run_interpreted(by_kernel, Case(dtype="float64"), "fused")


def test_a_cpu_gets_the_chunked_kernel_by_itself() -> None:
    assert "TRITON_INTERPRET" not in os.environ
    by_kernel(Case(), "auto")
