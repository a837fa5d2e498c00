"""The gated delta rule in torch, against the recurrence written out, and against leaks between packed sequences."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_grpo.trainer.model import delta_net
from megatron_grpo.trainer.model.delta_net import compute_delta_rule, convolve_packed, normalize_vectors

HEADS, KEY_DIM, VALUE_DIM = 3, 5, 6
LENGTHS = [[1], [7, 1, 33, 4], [2, 2, 70], [64, 32, 31, 65], [100]]
"""Shorter and longer than a chunk, and as long."""


def draw(lengths: list[int], seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Inputs of packed sequences, float64, and their ends."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(1, tokens, HEADS, *size, generator=generator, dtype=torch.float64)

    query, key = (normalize_vectors(normal(KEY_DIM)) for _ in range(2))
    inputs = [query, key, normal(VALUE_DIM), -F.softplus(normal()), normal().sigmoid()]
    return inputs, torch.tensor([0, *lengths]).cumsum(0)


def step_by_step(inputs: list[Tensor], ends: Tensor) -> Tensor:
    """The recurrence token by token, each sequence from a state of zeros: [1, tokens, heads, value_dim]."""
    query, key, value, g, beta = (tensor[0] for tensor in inputs)
    (heads, key_dim), value_dim = key.shape[1:], value.shape[-1]
    outputs = []
    for begin, end in pairwise(ends.tolist()):
        state = value.new_zeros(heads, key_dim, value_dim)
        for token in range(begin, end):
            state = state * g[token].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, key[token])
            state = state + torch.einsum("hk,hv->hkv", key[token], beta[token][:, None] * (value[token] - read))
            outputs.append(torch.einsum("hkv,hk->hv", state, query[token]) / key_dim**0.5)
    return torch.stack(outputs)[None]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunks_compute_the_recurrence_and_its_gradients(lengths: list[int]) -> None:
    inputs, ends = draw(lengths)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    chunks = [tensor.float().requires_grad_() for tensor in inputs]
    expected = step_by_step(leaves, ends)
    output, state = compute_delta_rule(*chunks, cu_seqlens=ends.int())
    assert state is None
    torch.testing.assert_close(output, expected.float(), atol=2e-6, rtol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weights).sum().backward()
    (output * weights.float()).sum().backward()
    for ours, theirs in zip(chunks, leaves, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_knows_nothing_of_its_neighbours(dtype: torch.dtype) -> None:
    """Bit by bit: other numbers before and after a sequence change none of its own, nor any of its gradients."""
    lengths, middle = [40, 35, 33], slice(40, 75)
    results = []
    for seed in (1, 2):
        inputs, ends = draw(lengths, seed)
        sequence, _ = draw([35], seed=9)
        for tensor, part in zip(inputs, sequence, strict=True):
            tensor[:, middle] = part
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        output, _ = compute_delta_rule(*leaves, cu_seqlens=ends)
        assert output.dtype == dtype
        output[:, middle].sum().backward()
        results.append([output[:, middle].detach(), *(leaf.grad for leaf in leaves)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second) if first.shape[1] == 35 else torch.equal(first[:, middle], second[:, middle])
    for gradient in results[0][1:]:
        outside = torch.cat([gradient[:, :40], gradient[:, 75:]], dim=1)
        assert not outside.any(), "no token of another sequence has a part in it"


def test_decays_of_any_size_stay_finite() -> None:
    inputs, ends = draw([50, 3])
    inputs[3] = torch.where(inputs[3] < -0.7, -1e4, inputs[3])
    leaves = [tensor.float().requires_grad_() for tensor in inputs]
    output, _ = compute_delta_rule(*leaves, cu_seqlens=ends)
    torch.testing.assert_close(output, step_by_step(inputs, ends).float(), atol=2e-6, rtol=1e-5)
    output.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("lengths", [[1], [2, 1, 9, 3]], ids=str)
@pytest.mark.parametrize("kernel", [1, 4])
def test_a_convolution_sees_the_last_tokens_of_its_own_sequence(lengths: list[int], kernel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, sum(lengths), 5, generator=generator), torch.randn(5, kernel, generator=generator)
    output, _ = convolve_packed(x, weight, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())
    expected = [
        F.silu(F.conv1d(part.T[None], weight[:, None], padding=kernel - 1, groups=5)[0, :, : len(part)]).T
        for part in x[0].split(lengths)
    ]
    torch.testing.assert_close(output[0], torch.cat(expected))


def test_a_chunk_is_shorter_than_sequences_of_the_tests() -> None:
    assert 1 < delta_net.CHUNK < 64
