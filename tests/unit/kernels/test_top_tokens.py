"""The likeliest tokens of a head against whole logits."""

import torch

from megatron_grpo_kernels.top_tokens import find_top_tokens


def test_the_likeliest_tokens_and_the_tail_are_those_of_whole_logits() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(9, 5, generator=generator), torch.randn(20, 5, generator=generator)
    logits = 1.5 * torch.tanh(hidden.double() @ weight[:17].double().t() / 1.5) * 0.7
    logprobs = logits.log_softmax(dim=1)
    for k in (1, 4, 17):
        ids, values, tail = find_top_tokens(hidden, weight, k, columns=17, scale=0.7, cap=1.5, chunk_tokens=2)
        expected = logprobs.topk(k, dim=1)
        assert torch.equal(ids, expected.indices)
        torch.testing.assert_close(values.double(), expected.values, atol=1e-6, rtol=1e-6)
        remainder = 1 - expected.values.exp().sum(dim=1)
        torch.testing.assert_close(tail.exp().double(), remainder, atol=1e-6, rtol=1e-5)


def test_a_microbatch_may_have_no_token() -> None:
    ids, values, tail = find_top_tokens(torch.zeros(0, 5), torch.ones(8, 5), 3)
    assert (ids.shape, values.shape, tail.shape) == ((0, 3), (0, 3), (0,))
