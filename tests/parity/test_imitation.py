"""Likelihoods beside the policy-gradient loss (ECHO, CHORD): gradients of transformers in every layout."""

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.chord_loss import ChordLossFn
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.parity.on_rank import expect_gradients
from tests.parity.policy_training import make_batch, make_engine, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, merge, rank_share, step_counts
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

LAYOUTS = [Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2), Layout(data=2)]
WEIGHT = 0.4


def make_mixed_batch() -> TokenBatch:
    """The usual sequences, most of whose other tokens are imitated; one sequence is only imitated, one not at all."""
    batch = make_batch()
    masks, imitated = batch.fields.loss_mask.split(batch.lengths), torch.zeros(sum(batch.lengths))
    draws = torch.rand(len(imitated), generator=torch.Generator().manual_seed(9)).split(batch.lengths)
    for number, (mask, part) in enumerate(zip(masks, imitated.split(batch.lengths), strict=True)):
        if number == 1:
            mask.zero_()
        part[1:] = ((draws[number] < 0.8) & (mask == 0))[1:].float() * (0.0 if number == 2 else 1.0)
    batch.fields.imitated = imitated
    return batch


def make_losses() -> list[ClippedPGLossFn]:
    """ECHO's, and CHORD's with factors of tokens."""
    echo = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0, environment_nll_weight=WEIGHT))
    chord = ChordLossFn(LossConfig(reference_policy_kl_penalty=0.0))
    chord.demonstration_weight, chord.favours_uncertain = WEIGHT, True
    return [echo, chord]


def gradients_on_rank(layout: Layout, model: TinyModel, packing: bool) -> list[tuple[dict[str, Tensor], float]]:
    """Gradients, and this rank's share of the likelihood, of every loss."""
    results, batch = [], make_mixed_batch()
    for loss_fn in make_losses():
        engine = make_engine(layout, model, distributed=False, packing=packing)
        share, microbatches, _ = rank_share(batch, layout)
        metrics = engine.compute_gradients(
            fetch(engine, share, loss_fn), microbatches, loss_fn, step_counts(make_mixed_batch())
        )
        name = "demonstration_nll" if isinstance(loss_fn, ChordLossFn) else "environment_nll"
        nll = sum(float(metric[name]) for metric in metrics) if engine._has_loss else 0.0
        results.append((whole_gradients(engine), nll))
    return results


def compute_losses(model: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Policy-gradient loss at ratio 1, likelihood and weighed likelihood, one sequence at a time."""
    batch = make_mixed_batch()
    fields = batch.fields
    columns = (fields.token_ids.long(), fields.loss_mask, fields.advantages, fields.imitated)
    gradient, nll, weighed = torch.zeros(3)
    for ids, mask, advantages, imitated in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        logits = model(ids[None], use_cache=False).logits[0, :-1] / 0.8  # the temperature of `make_engine`
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        gradient = gradient - (logprobs * advantages[1:] * mask[1:]).sum()
        probability = logprobs.detach().exp()
        nll = nll - logprobs[imitated[1:] > 0].sum()
        weighed = weighed - (logprobs * probability * (1 - probability))[imitated[1:] > 0].sum()
    return gradient / fields.loss_mask.sum(), nll / fields.imitated.sum(), weighed / fields.imitated.sum()


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], *rare(LAYOUTS[1:])], ids=str)
def test_gradients_of_mixtures_equal_transformers(
    layout: Layout, packing: bool, tiny_models: dict[str, TinyModel]
) -> None:
    tiny = next(iter(tiny_models.values()))
    by_rank = run_on_ranks(layout, gradients_on_rank, tiny, packing)
    for number in range(2):
        model = tiny.load()
        gradient, nll, weighed = compute_losses(model)
        total = gradient + WEIGHT * nll if number == 0 else (1 - WEIGHT) * gradient + WEIGHT * weighed
        total.backward()
        expected = weighed if number else nll
        assert sum(results[number][1] for results in by_rank) == pytest.approx(expected.item(), rel=1e-5)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        expect_gradients(merge([results[number][0] for results in by_rank]), gradients, floor=1e-3)
