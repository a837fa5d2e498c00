"""Log-probabilities over kept tokens on one rank: which tokens are kept against vLLM, values and gradients by hand."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_grpo_kernels import filtered_logprob, kept_tokens
from megatron_grpo_kernels.filtered_logprob import filtered_logprobs
from megatron_grpo_kernels.kept_tokens import find_kept_bounds
from megatron_grpo_kernels.token_filter import TokenFilter

TOKENS, HIDDEN, VOCAB, PADDED = 14, 6, 11, 16
FILTERS = {
    "top_p": TokenFilter(top_p=0.7),
    "top_k": TokenFilter(top_k=3),
    "min_p": TokenFilter(min_p=0.2),
    "top_k and top_p": TokenFilter(top_k=6, top_p=0.8),
    "all three": TokenFilter(top_k=5, top_p=0.9, min_p=0.05),
    "the likeliest": TokenFilter(top_k=1),
    "a tiny top_p": TokenFilter(top_p=1e-6),
    "more than there are": TokenFilter(top_k=500, top_p=0.95),
}


@pytest.fixture(params=[1024, 3], ids=["all sorted", "few candidates"])
def few_candidates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with so few candidates that some tokens need the whole vocabulary."""
    monkeypatch.setattr(filtered_logprob, "find_kept_bounds", partial(find_kept_bounds, candidates=request.param))


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight, targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def kept_by_hand(row: list[float], token_filter: TokenFilter) -> set[int]:
    """The kept entries of one token's logits without ties, one after the other."""
    order = sorted(range(len(row)), key=lambda entry: -row[entry])
    order = [entry for entry in order if math.exp(row[entry] - row[order[0]]) >= token_filter.min_p]
    order = order[: token_filter.top_k]
    total, before, token_set = sum(math.exp(row[entry]) for entry in order), 0.0, set()
    for entry in order:
        if token_set and before >= token_filter.top_p:
            break
        token_set.add(entry)
        before += math.exp(row[entry]) / total
    return token_set


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("name", FILTERS)
def test_values_and_gradients_are_those_of_a_softmax_over_the_kept_tokens(
    name: str, chunk: int | None, cap: float | None
) -> None:
    hidden, weight, targets = problem()
    logits = hidden @ weight[:VOCAB].t()
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) * 1.5
    targets[::2] = logits[::2].argmax(-1)  # of the others some are removed
    factors = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(1))
    options = {"columns": VOCAB, "scale": 1.5, "cap": cap, "chunk_tokens": chunk}
    filtered = filtered_logprobs(hidden, weight, targets, FILTERS[name], **options)

    token_sets = [kept_by_hand(row, FILTERS[name]) for row in logits.tolist()]
    mask = torch.tensor([[entry in row for entry in range(VOCAB)] for row in token_sets])
    distribution = torch.distributions.Categorical(logits=logits.masked_fill(~mask, -1e9))
    inside = mask.gather(1, targets[:, None])[:, 0]
    assert torch.equal(filtered.logprobs.isneginf(), ~inside)
    assert inside.any()
    expected = (
        torch.where(inside, distribution.log_prob(targets), 0.0),
        distribution.entropy(),
        torch.distributions.Categorical(logits=logits).log_prob(targets),
    )
    actual = (torch.where(inside, filtered.logprobs, 0.0), filtered.entropy, filtered.unfiltered)
    torch.testing.assert_close(actual, expected)
    losses = [
        sum((value * factor).sum() for value, factor in zip(both, factors, strict=True)) for both in (actual, expected)
    ]
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in losses]
    torch.testing.assert_close(*gradients)
    assert (gradients[0][1][VOCAB:] == 0).all(), "padding rows got a gradient"


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("grid", [None, 0.5], ids=["no ties", "ties"])
def test_kept_tokens_are_those_of_vllm(grid: float | None) -> None:
    """Of equally likely tokens vLLM keeps any: the number counts, so that its log-probability is found for each."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch  # here: vLLM takes long to import

    draw = torch.Generator().manual_seed(5)
    for _ in range(60):
        rows, vocab = 3, int(torch.randint(2, 40, (), generator=draw))
        logits = 3 * torch.randn(rows, vocab, generator=draw)
        if grid is not None:
            logits = (logits / grid).round() * grid
        top_k = [None, int(torch.randint(1, 50, (), generator=draw))][int(torch.randint(2, (), generator=draw))]
        top_p = [1.0, float(torch.rand((), generator=draw).clamp(0.01, 0.99))][int(top_k is None or vocab % 2)]
        per_row = None if top_k is None else torch.full((rows,), min(top_k, vocab))
        p = None if top_p == 1 else torch.full((rows,), top_p)
        theirs = apply_top_k_top_p_pytorch(logits.clone(), per_row, p, allow_cpu_sync=True).log_softmax(-1)
        for row, expected in zip(logits, theirs, strict=True):
            every = torch.arange(vocab)
            filtered = filtered_logprobs(row.expand(vocab, vocab), torch.eye(vocab), every, TokenFilter(top_k, top_p))
            is_kept = ~expected.isneginf()
            torch.testing.assert_close(filtered.logprobs[is_kept], expected[is_kept], atol=1e-5, rtol=0)
            tied = torch.isin(row, row[is_kept])  # with a kept one, and so no further from being kept
            assert torch.equal(filtered.logprobs.isneginf(), ~(is_kept | tied))
            entropy = torch.distributions.Categorical(logits=expected).entropy()
            torch.testing.assert_close(filtered.entropy, entropy.expand(vocab), atol=1e-5, rtol=0)


def test_min_p_is_that_of_vllm() -> None:
    logits = 2 * torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    probabilities = logits.softmax(-1)
    expected = probabilities < 0.1 * probabilities.amax(-1, keepdim=True)
    every = torch.arange(30).repeat(20)
    filtered = filtered_logprobs(logits.repeat_interleave(30, 0), torch.eye(30), every, TokenFilter(min_p=0.1))
    assert torch.equal(filtered.logprobs.isneginf().view(20, 30), expected)


def test_equally_likely_tokens_at_the_edge_share_the_gradient() -> None:
    """Two of three tied tokens are kept: each has two thirds of a place in the softmax."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -3.0]], requires_grad=True)
    filtered = filtered_logprobs(logits, torch.eye(5), torch.tensor([1]), TokenFilter(top_p=0.7))
    shares = torch.tensor([1.0, 2 / 3, 2 / 3, 2 / 3, 0.0])
    expected = logits[0, 1] - (shares * logits[0].exp()).sum().log()
    torch.testing.assert_close(filtered.logprobs[0], expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(logprob, logits)[0] for logprob in (filtered.logprobs[0], expected))
    )


def test_a_removed_target_has_no_gradient() -> None:
    logits = torch.tensor([[3.0, 0.0, -1.0]], requires_grad=True)
    filtered = filtered_logprobs(logits, torch.eye(3), torch.tensor([2]), TokenFilter(top_k=2))
    assert filtered.logprobs.isneginf().all()
    assert filtered.unfiltered.item() == pytest.approx(torch.tensor([3.0, 0.0, -1.0]).log_softmax(0)[2].item())
    filtered.logprobs.masked_fill(filtered.logprobs.isneginf(), 0.0).sum().backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("name", FILTERS)
def test_a_logit_that_is_no_number_does_not_pass_for_a_removed_token(name: str) -> None:
    logits = torch.tensor([[1.0, math.nan, 0.0, -5.0], [1.0, 2.0, 0.0, -5.0]])
    filtered = filtered_logprobs(logits, torch.eye(4), torch.tensor([3, 1]), FILTERS[name])
    assert filtered.logprobs[0].isnan()
    assert filtered.logprobs[1].isfinite()


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    filtered = filtered_logprobs(hidden, weight, targets, TokenFilter(top_k=PADDED))
    exact = (hidden @ weight.t()).double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(filtered.logprobs.double(), exact, atol=1e-5, rtol=0)
    filtered.logprobs.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_without_tokens_there_are_no_numbers() -> None:
    hidden, weight, _ = problem()
    filtered = filtered_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.int64), TokenFilter(top_p=0.5))
    assert [tensor.shape for tensor in filtered] == [(0,)] * 3
    (filtered.logprobs.sum() + filtered.entropy.sum()).backward()
    assert (weight.grad == 0).all()


def test_whole_vocabularies_are_sorted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens keep more than the candidates, no more of their logits are sorted at once."""
    monkeypatch.setattr(kept_tokens, "CHUNK_NUMBERS", 8 * 2 * 40)
    sizes: list[int] = []
    original = kept_tokens._compute_bounds

    def watched(logits: Tensor, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        sizes.append(len(logits))
        return original(logits, *arguments)

    monkeypatch.setattr(kept_tokens, "_compute_bounds", watched)
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)) / 10  # nearly uniform: many are kept
    bounds = find_kept_bounds(logits, TokenFilter(top_p=0.9), kept_tokens.Vocabulary(0, 40, None), candidates=4)
    assert sizes == [7, 2, 2, 2, 1]
    expected = find_kept_bounds(logits, TokenFilter(top_p=0.9), kept_tokens.Vocabulary(0, 40, None))
    torch.testing.assert_close((bounds.cut, bounds.share), (expected.cut, expected.share))
