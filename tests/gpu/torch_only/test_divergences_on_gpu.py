"""Divergences of a student from its teacher on a GPU, against whole distributions in float64 on the CPU."""

import pytest
import torch
from torch import Tensor

from megatron_grpo_kernels.divergence import Divergence, TeacherStates, TeacherTokens, linear_divergence
from tests.support.fp8_oracle import expected_divergence, with_tail

TOKENS, HIDDEN, VOCAB, TOP = 300, 256, 5000, 16
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Of values and gradients, relative to the expected tensor, both as norms."""


def compute(name: str, top: int | None, tensors: list[Tensor], compare: bool) -> tuple[Tensor, ...]:
    """Values and gradients by the student's hidden states and head, from the function or from the definition."""
    hidden, head, theirs, their_head = tensors
    hidden.requires_grad_(), head.requires_grad_()
    teacher = (theirs.double() @ their_head.double().t()).log_softmax(dim=-1)
    chosen = teacher.topk(TOP).indices
    if compare:
        student = (hidden @ head.t()).log_softmax(dim=-1)
        laws = (student, teacher) if top is None else (with_tail(student, chosen), with_tail(teacher, chosen))
        values = expected_divergence(*laws, name, 0.3)
    else:
        tailed = with_tail(teacher, chosen).float()
        is_whole = top is None
        source = TeacherStates(theirs, their_head) if is_whole else TeacherTokens(chosen, tailed[:, :-1], tailed[:, -1])
        values = linear_divergence(hidden, head, source, Divergence(name, 0.3), columns=VOCAB, chunk_tokens=128)
    return (values.detach(), *torch.autograd.grad(values.sum(), [hidden, head]))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("top", [None, TOP])
@pytest.mark.parametrize("name", ["reverse", "forward", "mixed", "jensen_shannon"])
def test_values_and_gradients_are_those_of_the_definition(
    name: str, top: int | None, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    sizes = (TOKENS, HIDDEN), (VOCAB, HIDDEN), (TOKENS, HIDDEN), (VOCAB, HIDDEN)
    drawn = [(0.3 * torch.randn(*size, generator=generator)).to(dtype) for size in sizes]
    actual = compute(name, top, [tensor.to(device) for tensor in drawn], compare=False)
    expected = compute(name, top, [tensor.double() for tensor in drawn], compare=True)
    for value, definition in zip(actual, expected, strict=True):
        assert (value.cpu().double() - definition).norm() < TOLERANCES[dtype] * definition.norm()
