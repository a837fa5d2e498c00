"""Where packed tokens stand, and attention over them, against attention with a mask over the whole microbatch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.platform.device import detect_platform
from megatron_grpo.trainer.model.attention import TorchCoreAttention
from megatron_grpo.trainer.model.packed_sequences import PackedLayout, build_packed_sequences, lay_out

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
HEADS, GROUPS, HEAD_DIM = 4, 2, 8


def ranks(lengths: list[int], size: int, **options: int) -> list[PackedLayout]:
    return [lay_out(lengths, rank=rank, size=size, **options) for rank in range(size)]


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_every_token_stands_on_one_rank_at_its_position(
    lengths: list[int], size: int, multiple: int, rectangle: bool
) -> None:
    options = {"width": max(lengths)} if rectangle else {}
    placed = ranks(lengths, size, tensor_multiple=multiple, **options)
    (tokens,) = {part.local_tokens for part in placed}
    assert tokens % multiple == 0
    positions = np.concatenate([np.arange(length) for length in lengths])
    sources = np.concatenate([part.source for part in placed])
    assert sorted(sources[sources >= 0].tolist()) == list(range(sum(lengths)))
    at = np.concatenate([part.positions for part in placed])
    assert (at[sources >= 0] == positions[sources[sources >= 0]]).all()
    padding, unit = int((sources < 0).sum()), np.lcm(2 * size if size > 1 else 1, size * multiple)
    if not rectangle:
        assert padding < len(lengths) * (2 * size if size > 1 else 1) + unit, "only what the layout needs"
    assert len({int(part.positions.sum()) for part in placed}) == 1, "level in what attention costs"


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.data())
def test_a_token_is_predicted_by_the_one_before_it(lengths: list[int], size: int, data: st.DataObject) -> None:
    targets = np.array(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))))
    firsts = np.cumsum([0, *lengths[:-1]])
    predicted: list[int] = []
    for rank in ranks(lengths, size):
        rows, tokens = rank.find_predicting(targets)
        assert (rank.source[rows] == tokens - 1).all()
        predicted += tokens.tolist()
    assert sorted(predicted) == [token for token in np.flatnonzero(targets) if token not in firsts]


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None, chunked: bool
) -> Tensor:
    """[tokens, heads, head_dim] each to [tokens, heads * head_dim], one sequence at a time in float64."""
    outs = []
    repeat = HEADS // GROUPS
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeat, 1)) * HEAD_DIM**-0.5
        positions = torch.arange(len(q))
        is_seen = positions[None, :] <= positions[:, None]
        if window is not None and chunked:
            is_seen &= positions[None, :] // window == positions[:, None] // window
        elif window is not None:
            is_seen &= positions[None, :] > positions[:, None] - window
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeat, 1)).flatten(1))
    return torch.cat(outs)


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (1, False), (5, False), (1, True), (5, True)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[7], [9, 9, 9], [30, 1, 12, 11, 3, 29, 30, 2]], ids=str)
def test_attention_is_that_of_each_sequence(
    lengths: list[int], size: int, window: int | None, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its gradient. Context-parallel ranks are played one after the other, with all keys at hand."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(total, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(total, GROUPS, HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    expected = plain_attention(query, key, value, lengths, window, chunked)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, (query, key, value), upstream)

    placed = ranks(lengths, size)
    sources = torch.from_numpy(np.concatenate([part.source for part in placed])).clamp(min=0)
    windows = {"window_size": window and (window - 1, 0), "window_attn_skip_freq": [0, 1]}
    config: Any = SimpleNamespace(
        context_parallel_size=1, platform=detect_platform(), softmax_type="vanilla", **windows
    )
    attention = TorchCoreAttention(config, layer_number=2)
    assert attention.window == window
    assert TorchCoreAttention(config, layer_number=1).window is None
    if size > 1:
        attention._context = "the ranks"  # type: ignore[assignment]
        both = torch.cat([key, value], dim=-1)[sources][:, None]
        module = "megatron_grpo.trainer.model.attention.gather_from_sequence_parallel_region"
        monkeypatch.setattr(module, lambda local, group: both)
    actual = torch.zeros_like(expected)
    for part in placed:
        source = torch.from_numpy(part.source)
        q, k, v = (tensor[source.clamp(min=0)][:, None] for tensor in (query, key, value))
        packed = build_packed_sequences(part, transformer_engine=False, window=window, chunked=chunked)
        out = attention(q, k, v, None, packed_seq_params=packed)
        if window is not None:
            assert all(rectangle.keys.shape[1] < 2 * window for rectangle in packed.windowed_calls.rectangles)
        assert out.shape == (part.local_tokens, 1, HEADS * HEAD_DIM)
        actual = actual.index_put((source[source >= 0],), out[source >= 0, 0])
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    for actual_gradient, gradient in zip(
        torch.autograd.grad(actual, (query, key, value), upstream), expected_gradients, strict=True
    ):
        torch.testing.assert_close(actual_gradient, gradient, atol=1e-12, rtol=1e-12)
