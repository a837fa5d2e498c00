"""The KL penalty's gradient against that of the divergence between whole responses, summed over all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.loss import GlobalCounts, Segments, remaining_sum
from megatron_grpo.losses.policy_loss import ClippedPGLossFn

TOKENS, LENGTH = 3, 3
RESPONSES = list(itertools.product(range(TOKENS), repeat=LENGTH))


def logprobs_of(tables: list[Tensor]) -> Tensor:
    """[responses, length]: of every response, under a policy whose table t has a row for each beginning of t tokens."""
    rows = []
    for response in RESPONSES:
        row = []
        for place, token in enumerate(response):
            begun = sum(one * TOKENS**power for power, one in enumerate(response[:place]))
            row.append(tables[place].log_softmax(-1)[begun, token])
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.fixture
def policies() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(4)
    policy = [torch.randn(TOKENS**place, TOKENS, dtype=torch.float64, requires_grad=True) for place in range(LENGTH)]
    reference = [torch.randn(TOKENS**place, TOKENS, dtype=torch.float64) for place in range(LENGTH)]
    return policy, reference


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("flat", [False, True])
def test_its_expectation_is_the_gradient_of_the_divergence(
    policies: tuple[list[Tensor], list[Tensor]], kind: str, flat: bool
) -> None:
    policy, reference = policies
    exact_logprobs = logprobs_of(policy).sum(dim=1)
    divergence = (exact_logprobs.exp() * (exact_logprobs - logprobs_of(reference).sum(dim=1))).sum()
    expected = torch.autograd.grad(divergence, policy)

    actual = gradient(policy, reference, kind, flat, score_function=True)
    torch.testing.assert_close(actual, expected)
    without = gradient(policy, reference, kind, flat, score_function=False)
    assert max(float((one - other).abs().max()) for one, other in zip(without, expected, strict=True)) > 0.05


def gradient(
    policy: list[Tensor], reference: list[Tensor], kind: str, flat: bool, *, score_function: bool
) -> tuple[Tensor, ...]:
    """Expected gradient of the loss, each response with its probability, and with nothing but the penalty in it."""
    config = LossConfig(
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type=kind,  # type: ignore[arg-type]
        kl_score_function_gradient=score_function,
        constant_normalizer_tokens=1,
    )
    curr, under_reference = logprobs_of(policy), logprobs_of(reference)
    probabilities = curr.detach().sum(dim=1).exp()
    total: list[Tensor] = [torch.zeros_like(table) for table in policy]
    for number, probability in enumerate(probabilities):
        loss = one_loss(config, curr[[number]], under_reference[[number]], flat)
        for place, part in enumerate(torch.autograd.grad(loss, policy, retain_graph=True, allow_unused=True)):
            total[place] += 0 if part is None else probability * part
    return tuple(total)


def one_loss(config: LossConfig, curr: Tensor, reference: Tensor, flat: bool) -> Tensor:
    def shaped(values: Tensor) -> Tensor:
        return values.flatten() if flat else values

    fields = TokenFields(
        loss_mask=shaped(torch.ones_like(curr)),
        advantages=shaped(torch.zeros_like(curr)),
        generation_logprobs=shaped(curr.detach()),
        reference_logprobs=shaped(reference),
    )
    counts = GlobalCounts(tokens=float(LENGTH), sequences=1.0, all_sequences=1.0, positive_tokens=0.0)
    segments = Segments(torch.zeros(LENGTH, dtype=torch.int64), torch.full((1,), float(LENGTH))) if flat else None
    return ClippedPGLossFn(config)(shaped(curr), fields, counts, segments)[0]


def test_what_remains_of_a_response() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    mask = torch.tensor([True, False, True, True, True, True])
    segments = Segments(torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([2.0, 2.0, 1.0]))
    assert remaining_sum(values, mask, segments).tolist() == [5.0, 4.0, 4.0, 24.0, 16.0, 32.0]
    assert remaining_sum(values.view(2, 3), mask.view(2, 3), None).tolist() == [[5.0, 4.0, 4.0], [56.0, 48.0, 32.0]]
    shared = Segments(segments.sequence_index, segments.sizes, sum_over_ranks=lambda sums: sums)
    with pytest.raises(AssertionError, match="context parallelism"):
        remaining_sum(values, mask, shared)
