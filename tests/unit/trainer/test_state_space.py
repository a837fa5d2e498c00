"""Mamba-2's recurrence in chunks against one token after the other, each sequence from an empty state."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_grpo.models.shape import MambaShape
from megatron_grpo.trainer.model.mamba import CHUNK, convolve_packed, scan_states

HEADS, GROUPS, DIM, STATE = 6, 2, 3, 5
LENGTHS = [1, CHUNK - 1, 2, 3 * CHUNK + 7, 1, 1, CHUNK, 20]
"""Sequences within a chunk, up to its end, over several, and of one token."""


def draw(lengths: list[int]) -> dict[str, Tensor]:
    """Inputs of the recurrence, with gradients."""
    generator, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    normal = {
        "x": (tokens, HEADS, DIM),
        "dt": (tokens, HEADS),
        "decay": (HEADS,),
        "write": (tokens, GROUPS, STATE),
        "read": (tokens, GROUPS, STATE),
    }
    drawn = {name: torch.randn(size, generator=generator) for name, size in normal.items()}
    drawn["dt"], drawn["decay"] = F.softplus(drawn["dt"]), -drawn["decay"].exp()
    return {name: values.requires_grad_() for name, values in drawn.items()}


def number(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def scan_token_by_token(
    lengths: list[int], x: Tensor, dt: Tensor, decay: Tensor, write: Tensor, read: Tensor
) -> Tensor:
    """The recurrence of the docstring, in float64."""
    write, read = (values.repeat_interleave(HEADS // GROUPS, dim=1).double() for values in (write, read))
    outputs = []
    for sequence in number(lengths).split(lengths):
        state, begin = torch.zeros(HEADS, STATE, DIM, dtype=torch.float64), len(outputs)
        for token in range(begin, begin + len(sequence)):
            remaining = (dt[token] * decay).double().exp()[:, None, None]
            added = dt[token].double()[:, None, None] * write[token][:, :, None] * x[token].double()[:, None, :]
            state = remaining * state + added
            outputs.append(torch.einsum("hnp,hn->hp", state, read[token]))
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", [LENGTHS, [1], [CHUNK], [5, 3]], ids=str)
def test_chunks_equal_one_token_after_the_other(lengths: list[int]) -> None:
    inputs = draw(lengths)
    actual = scan_states(**inputs, sequence=number(lengths))
    expected = scan_token_by_token(lengths, **inputs)
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((actual * weights).sum(), list(inputs.values()))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), list(inputs.values()))
    for name, gradient, exact in zip(inputs, gradients, expected_gradients, strict=True):
        assert (gradient - exact).norm() <= 2e-5 * exact.norm(), name


def test_no_state_passes_from_one_sequence_to_the_next() -> None:
    """An output has no gradient of a token of another sequence, nor of a later one."""
    lengths = [CHUNK // 2, CHUNK, 3]
    inputs, sequence = draw(lengths), number(lengths)
    outputs = scan_states(**inputs, sequence=sequence)
    for token in (CHUNK // 2, CHUNK, CHUNK // 2 + CHUNK - 1, len(sequence) - 1):
        (gradient,) = torch.autograd.grad(outputs[token].sum(), inputs["x"], retain_graph=True)
        is_seen = gradient.abs().sum(dim=(1, 2)) > 0
        index = torch.arange(len(sequence))
        assert torch.equal(is_seen, (sequence == sequence[token]) & (index <= token))


def test_strong_decays_give_no_infinities() -> None:
    inputs = {name: values.detach() for name, values in draw(LENGTHS).items()}
    inputs |= {"dt": inputs["dt"] * 100, "decay": inputs["decay"] * 100}
    inputs["dt"].requires_grad_()
    outputs = scan_states(**inputs, sequence=number(LENGTHS))
    outputs.sum().backward()
    assert torch.isfinite(outputs).all()
    assert torch.isfinite(inputs["dt"].grad).all()


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [2], [1, 5, 2, 1, 9]], ids=str)
def test_convolution_sees_its_own_sequence(lengths: list[int], kernel: int) -> None:
    generator = torch.Generator().manual_seed(kernel)
    x = torch.randn(sum(lengths), 3, generator=generator)
    weight, bias = torch.randn(3, kernel, generator=generator), torch.randn(3, generator=generator)
    expected = [
        F.silu(F.conv1d(F.pad(part.T, (kernel - 1, 0)), weight[:, None], bias, groups=3).T) for part in x.split(lengths)
    ]
    torch.testing.assert_close(convolve_packed(x, weight, bias, number(lengths)), torch.cat(expected))


def test_channels_are_those_of_inputs_and_both_vectors_of_each_group() -> None:
    assert MambaShape(heads=64, groups=8, head_dim=64, state=128, kernel=4).channels == 6144
