"""The policy-gradient loss and its variants against loops over tokens, exact expectations and finite differences."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.packing import SequencePadder
from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.formulas import WEIGHTS
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.corrections import correction_factor, make_corrections
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.objectives import Responses
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.support.loss_oracle import CONFIGS, counts_of, loop_loss, random_batch
from tests.support.token_fields import mapped

ONE = GlobalCounts(tokens=1.0, sequences=1.0, all_sequences=1.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_matches_a_loop_over_tokens(name: str) -> None:
    curr, tokens = random_batch(1)
    loss, metrics = ClippedPGLossFn(CONFIGS[name])(curr, tokens, counts_of(tokens))
    assert loss.item() == pytest.approx(loop_loss(curr, tokens, CONFIGS[name]), rel=1e-12)
    assert metrics["loss"].item() == loss.item()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sequence_of_weight_half_counts_as_one_copy_where_others_count_as_two(name: str) -> None:
    curr, tokens = random_batch(1)
    copies = torch.tensor([2, 1, 1, 2, 2, 1])
    repeated = mapped(tokens, lambda values: values.repeat_interleave(copies, dim=0))
    tokens.weight = (copies / 2).double()[:, None].expand_as(curr)
    results = []
    for batch, rows in ((tokens, torch.ones(6, dtype=torch.int64)), (repeated, copies)):
        leaf = curr.clone().requires_grad_()
        loss, _ = ClippedPGLossFn(CONFIGS[name])(leaf.repeat_interleave(rows, dim=0), batch, counts_of(batch))
        loss.backward()
        results.append((loss.item(), leaf.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-15)


def find_factors(config: LossConfig, prev: Tensor, generation: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of each token in the loss, and where it was changed; the policy is that before the step."""
    mask = torch.ones_like(prev, dtype=torch.bool)
    inputs = {"logprobs": prev, "sampling_logprobs": generation, "mask": mask, "responses": Responses(mask, None)}
    return correction_factor(config, make_corrections(config), prev, inputs)


WEIGHED = ("cispo", "dppo_tv", "dppo_kl", "vespo", "fipo")
"""Objectives with a weight that has no gradient, whose gradients have tests of their own."""


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WEIGHED])
def test_gradient_matches_finite_differences(name: str) -> None:
    curr, tokens = random_batch(2, sequences=3, length=7)
    if CONFIGS[name].averages_responses:  # the other gradient has a test of its own
        tokens.advantages = tokens.advantages[:, :1].expand_as(curr)
    loss_fn = ClippedPGLossFn(CONFIGS[name])
    assert torch.autograd.gradcheck(
        lambda x: loss_fn(x, tokens, counts_of(tokens))[0], (curr.clone().requires_grad_(),)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_may_hold_anything(name: str) -> None:
    curr, tokens = random_batch(3)
    dirty = mapped(tokens, Tensor.clone)
    outside = tokens.loss_mask == 0
    dirty.prev_logprobs[outside] = math.inf
    dirty.generation_logprobs[outside] = math.nan
    dirty.reference_logprobs[outside] = math.nan
    dirty.entropy[outside] = math.nan
    dirty.positive[outside] = math.nan
    dirty.advantages[outside] = -math.inf
    clean_input, dirty_input = curr.clone(), curr.clone()
    dirty_input[outside] = -math.inf
    results = []
    for values, batch in ((clean_input, tokens), (dirty_input, dirty)):
        values.requires_grad_()
        loss, metrics = ClippedPGLossFn(CONFIGS[name])(values, batch, counts_of(tokens))
        loss.backward()
        results.append((loss.detach(), values.grad, metrics))
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)
    assert results[1][1] is not None
    assert torch.count_nonzero(results[1][1][outside]) == 0


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    order=st.permutations(range(6)),
    data_parallel=st.sampled_from([1, 2, 3]),
    microbatch_tokens=st.integers(1, 60),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_loss_and_gradient_do_not_depend_on_how_the_step_is_cut_up(
    name: str, order: list[int], data_parallel: int, microbatch_tokens: int, multiple: int
) -> None:
    """Order, packing into microbatches, padding and data-parallel ranks: all shares together are the step."""
    curr, tokens = random_batch(4)
    counts, loss_fn = counts_of(tokens), ClippedPGLossFn(CONFIGS[name])
    curr.requires_grad_()
    full, whole_metrics = loss_fn(curr, tokens, counts)
    (whole_gradient,) = torch.autograd.grad(full, curr)
    lengths = [int(row.nonzero().max()) + 1 for row in tokens.loss_mask]
    plan = SequencePadder(microbatch_tokens, multiple).assign_microbatches(
        [lengths[row] for row in order], data_parallel
    )

    def part(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        width = math.ceil(max(lengths[row] for row in rows) / multiple) * multiple

        def fit(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(values[rows], (0, width - values.shape[1]))

        return loss_fn(fit(curr), mapped(tokens, fit), counts)

    parts = [part([order[i] for i in microbatch]) for rank in plan for microbatch in rank]
    total = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(total, full)
    torch.testing.assert_close(torch.autograd.grad(total, curr)[0], whole_gradient)
    for key, value in whole_metrics.items():
        shares = torch.stack([metrics[key] for _, metrics in parts])
        reduced = shares.amax() if key.endswith("_max") else shares.amin() if key.endswith("_min") else shares.sum()
        torch.testing.assert_close(reduced, value, msg=lambda text, key=key: f"{key}: {text}")


def test_without_previous_logprobs_the_step_is_on_policy() -> None:
    curr, tokens = random_batch(5)
    tokens.prev_logprobs = None
    config = CONFIGS["plain"]
    values = curr.clone().requires_grad_()
    loss, metrics = ClippedPGLossFn(config)(values, tokens, counts_of(tokens))
    loss.backward()
    mask, advantages = tokens.loss_mask, tokens.advantages
    assert values.grad is not None
    # At ratio 1 the gradient is REINFORCE's: -A * d(logprob), averaged over tokens.
    torch.testing.assert_close(values.grad, -advantages * mask / mask.sum())
    assert metrics["probs_ratio"].item() == pytest.approx(1.0)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


def test_cispo_gives_every_token_its_clipped_ratio_as_weight() -> None:
    curr, tokens = random_batch(13)
    config = LossConfig(reference_policy_kl_penalty=0.0, use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.3)
    values = curr.clone().requires_grad_()
    ClippedPGLossFn(config)(values, tokens, counts_of(tokens))[0].backward()
    weights = (curr - tokens.prev_logprobs).exp().clamp(max=1.3)
    mask = tokens.loss_mask
    assert values.grad is not None
    torch.testing.assert_close(values.grad, -weights * tokens.advantages * mask / mask.sum())
    assert (weights == 1.3).any(), "the batch has to reach the bound to test it"


@pytest.mark.parametrize("name", ["plain", "gspo", "cispo", "sapo", "reinforce", "dual"])
def test_on_the_first_step_every_surrogate_has_the_gradient_of_reinforce(name: str) -> None:
    """At ratio 1 nothing is clipped, so all of them are -A * d(logprob), each averaged its own way."""
    curr, tokens = random_batch(14)
    tokens.prev_logprobs = None
    config = replace(CONFIGS[name], reference_policy_kl_penalty=0.0)
    values = curr.clone().requires_grad_()
    ClippedPGLossFn(config)(values, tokens, counts_of(tokens))[0].backward()
    mask, advantages = tokens.loss_mask, tokens.advantages
    expected = -advantages * mask / mask.sum()
    if name == "gspo":  # a mean over responses
        expected = -advantages * mask / mask.sum(dim=1, keepdim=True) / len(mask)
    torch.testing.assert_close(values.grad, expected)


def test_a_forced_on_policy_ratio_ignores_the_old_policy() -> None:
    curr, tokens = random_batch(15)
    config = LossConfig(reference_policy_kl_penalty=0.0, force_on_policy_ratio=True)
    without = replace(tokens, prev_logprobs=None)
    gradients = []
    for batch in (tokens, without):
        values = curr.clone().requires_grad_()
        _, metrics = ClippedPGLossFn(config)(values, batch, counts_of(tokens))
        ClippedPGLossFn(config)(values, batch, counts_of(tokens))[0].backward()
        gradients.append(values.grad)
        assert metrics["probs_ratio_max"] == metrics["probs_ratio_min"] == 1
    torch.testing.assert_close(gradients[0], gradients[1], atol=0, rtol=0)


def test_gspo_leaves_advantages_of_tokens_in_their_places() -> None:
    """The gradient of eq. 17 (Zheng et al. 2025): s A_t d(logprob_t) / n, where s is the whole response's ratio."""
    curr, tokens = random_batch(17)
    config = replace(CONFIGS["gspo"], reference_policy_kl_penalty=0.0, ratio_clip_min=1.0, ratio_clip_max=1e6)
    values = curr.clone().requires_grad_()
    ClippedPGLossFn(config)(values, tokens, counts_of(tokens))[0].backward()
    mask = tokens.loss_mask
    n = mask.sum(dim=1, keepdim=True)
    s = (((curr - tokens.prev_logprobs) * mask).sum(dim=1, keepdim=True) / n).exp()
    torch.testing.assert_close(values.grad, -s * tokens.advantages * mask / n / len(mask))


@pytest.mark.parametrize("name", ["plain", "gspo", "sapo", "correction", "gspo_corrected", "on_policy_kl", "dual"])
@pytest.mark.parametrize("far", [-500.0, 500.0])
def test_absurd_ratios_stay_finite(name: str, far: float) -> None:
    """Also in float32, and where the advantage is 0: infinity times that would be NaN."""
    curr, tokens = random_batch(18)
    tokens = mapped(tokens, Tensor.float)
    tokens.advantages[:, 3] = 0.0
    tokens.prev_logprobs[:, 3] -= far
    tokens.generation_logprobs[:, 4] += far
    values = curr.float().requires_grad_()
    loss, _ = ClippedPGLossFn(CONFIGS[name])(values, tokens, counts_of(tokens))
    loss.backward()
    assert loss.isfinite()
    assert values.grad.isfinite().all()


def test_gspo_weighs_a_response_as_the_probability_of_its_text() -> None:
    """The sampling correction at the sequence level makes a mean over samples unbiased: sum over all texts is exact."""
    generator = torch.Generator().manual_seed(16)
    train, sample = (torch.randn(2, 3, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2))
    texts = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    prev, drawn = (policy[torch.arange(2), texts] for policy in (train, sample))
    config = replace(CONFIGS["gspo_corrected"], truncated_importance_sampling_type=None)
    weights = find_factors(config, prev, drawn)[0][:, 0]
    worth = torch.arange(9, dtype=torch.float64)
    torch.testing.assert_close((drawn.sum(1).exp() * weights * worth).sum(), (prev.sum(1).exp() * worth).sum())


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0)])
def test_limits_of_the_sampling_correction_are_inside(kind: str, low: float, high: float) -> None:
    """Where both frameworks agree every weight is exactly 1, and so is the mean of a response."""
    config = LossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
    )
    logprobs = random_batch(19)[1].generation_logprobs
    weights, out_of_bounds = find_factors(config, logprobs, logprobs)
    assert (weights == 1).all()
    assert not out_of_bounds.any()


def test_on_policy_kl_has_the_gradient_of_the_exact_divergence() -> None:
    """In expectation over all tokens of a small vocabulary, at ratio 1 and away from it."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(11, generator=generator, dtype=torch.float64, requires_grad=True)
    reference, old = (torch.randn(11, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    curr = logits.log_softmax(0)
    exact = (curr.exp() * (curr - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for prev in (curr.detach(), old):
        # Each token of the vocabulary is one sequence, weighted by its probability under the sampling policy. The loss
        # is linear in the weight of a sequence, so the weighted sum of losses is the expectation.
        total = torch.zeros((), dtype=torch.float64)
        for token in range(11):
            tokens = TokenFields(
                loss_mask=torch.ones(1, 1),
                advantages=torch.zeros(1, 1, dtype=torch.float64),
                generation_logprobs=prev[token].view(1, 1),
                prev_logprobs=prev[token].view(1, 1),
                reference_logprobs=reference[token].view(1, 1),
            )
            config = LossConfig(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
            loss, _ = ClippedPGLossFn(config)(curr[token].view(1, 1), tokens, ONE)
            total = total + prev[token].exp() * loss
        (actual,) = torch.autograd.grad(total, logits, retain_graph=True)
        torch.testing.assert_close(total.detach(), exact.detach())
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "entry", "key"),
    [
        ("kl", "reference_logprobs", "reference_policy_kl_penalty"),
        ("entropy", "entropy", "entropy_coef"),
        ("imitation", "positive", "positive_example_nll_weight"),
    ],
)
def test_an_option_that_the_data_cannot_support_is_an_error(name: str, entry: str, key: str) -> None:
    curr, tokens = random_batch(9)
    counts = counts_of(tokens)
    with pytest.raises(ValueError, match=f"loss_fn.{key} needs {entry}"):
        ClippedPGLossFn(CONFIGS[name])(curr, replace(tokens, **{entry: None}), counts)


@pytest.mark.parametrize("name", ["plain", "sequences", "dr_grpo"])
def test_a_response_that_is_left_out_changes_the_average_as_documented(name: str) -> None:
    """Averages over tokens and sequences leave it out; Dr. GRPO's constant does not: that is what makes it constant."""
    curr, tokens = random_batch(10)
    full = ClippedPGLossFn(CONFIGS[name])(curr, tokens, counts_of(tokens))[0]
    rows = len(curr)
    padded = mapped(tokens, lambda values: torch.cat([values, values]))
    padded.loss_mask[rows:] = 0
    loss = ClippedPGLossFn(CONFIGS[name])(torch.cat([curr, curr]), padded, counts_of(padded))[0]
    torch.testing.assert_close(loss, full / 2 if name == "dr_grpo" else full)


def test_the_loss_can_be_sent_to_another_process() -> None:
    curr, tokens = random_batch(11)
    loss_fn = ClippedPGLossFn(CONFIGS["everything"])
    copy = pickle.loads(pickle.dumps(loss_fn))
    assert torch.equal(copy(curr, tokens, counts_of(tokens))[0], loss_fn(curr, tokens, counts_of(tokens))[0])
